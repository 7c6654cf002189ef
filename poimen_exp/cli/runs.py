"""``poimen plan | run | eval | resume | inspect | report | dashboard | read | export-verl``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poimen_exp.cli import evaluate, plan, read, report


def register(app: typer.Typer) -> None:
    """Adds the commands that work on runs."""
    app.command("plan")(plan.plan)
    app.command("run")(plan.run)
    app.command("export-verl")(plan.export_verl)
    app.command("resume")(resume)
    app.command("eval")(evaluate.evaluate)
    app.command("inspect")(inspect)
    app.command("report")(report.report)
    app.command("dashboard")(report.dashboard)
    app.command("read")(read.read)


def inspect(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify the files of a run, then tell its counters, rewards, advantages, memory and times."""
    from poimen_exp.tracking.inspect import run_inspect

    run_inspect(run, as_json=json)


def resume(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE, as trainer.total_training_steps=N.")] = None,
) -> None:
    """Go on with a run from its newest complete checkpoint."""
    from poimen_exp import app

    app.resume(run, overrides or [])
