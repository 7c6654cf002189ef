"""``poimen report`` and ``poimen dashboard``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class At(StrEnum):
    """The validation that a run is judged by."""

    last = "last"
    best = "best"


def report(
    sweep: Annotated[Path, typer.Argument(help="Folder of a sweep: multirun/<experiment>/<time>.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the report. [default: SWEEP/report]")] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Two alphas. [default: each against 0.9, or the first]")
    ] = None,
    at: Annotated[At, typer.Option(help="Judge a run by its last validation, or by the best one.")] = At.last,
    partial: Annotated[
        bool, typer.Option("--partial", help="Count runs that go on, all up to the last step that all validated.")
    ] = False,
) -> None:
    """Compare the settings of a sweep: table, paired differences, curves (PNG and one HTML page), verdict."""
    from poimen_exp.sweep.report import make_report, write_report
    from poimen_exp.sweep.report_terminal import print_report

    made = make_report(sweep, at.value, compare, partial=partial)
    paths = write_report(made, out or sweep / "report")
    print_report(made, paths)


def dashboard(
    sweep: Annotated[Path | None, typer.Argument(help="Folder of a sweep; left out: the whole project.")] = None,
    entity: Annotated[str | None, typer.Option(help="User or team. [default: the sweep's, or the key's]")] = None,
    project: Annotated[str | None, typer.Option(help="Project in W&B. [default: the sweep's]")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("dashboard.json"),
    save: Annotated[bool | None, typer.Option(help="Save to W&B. [default: if there is a key]")] = None,
) -> None:
    """Build the four panels of the alpha ablation as a W&B workspace: a JSON file, saved where there is a key."""
    from poimen_exp.sweep.dashboard import place_of, write_dashboard

    print(write_dashboard(place_of(sweep, entity, project), out, save=save))
