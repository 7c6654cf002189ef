"""``poimen plan | run | export-verl``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[
    Path | None,
    typer.Argument(help="YAML file: a resolved verl configuration, or one of ours.", metavar="[CONFIG]"),
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(help="KEY=VALUE on top of it.", metavar="[KEY=VALUE]...")
]


def plan(
    config: ConfigArgument = None,
    overrides: OverridesArgument = None,
    example: Annotated[
        str | None, typer.Option("--example", help="A packaged experiment (conf/experiment) in place of CONFIG.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write a configuration that runs to this file (NAME.template.yaml where something is left to fill "
            "in), and NAME.import-report.json beside it.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load model, tokenizer, tasks and rewards, run the gate check; no step.")
    ] = False,
    all_leaves: Annotated[
        bool, typer.Option("--all", help="Every leaf, not only what is refused, changed from its default, or lowered.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what one device does with each field of a configuration, and refuse what it cannot do."""
    from poimen_exp.errors import Refused
    from poimen_exp.solo.plan_report import PlanRequest, report_plan
    from poimen_exp.solo.plan_source import example_source, file_source

    lines = list(overrides or [])
    if example is not None:
        source = example_source(example, lines if config is None else [str(config), *lines])
    elif config is None:
        raise Refused("poimen plan: got no CONFIG, expected a YAML file, or --example NAME")
    else:
        source = file_source(config, lines)
    report_plan(source, PlanRequest(json, all_leaves, out, force, dry_run))


def export_verl(
    run: Annotated[Path, typer.Argument(help="Folder of a finished solo run.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
) -> None:
    """Pack a run for verl on a cluster: adapter, critic, data, configuration, checksums, and a launch file."""
    from poimen_exp.solo.export_verl import export_verl as export

    print(f"wrote {export(run, out)}; set the paths in its launch.sh and run that")


def run(
    config: Annotated[Path, typer.Argument(help="YAML file that `poimen plan --out` wrote.")],
    overrides: OverridesArgument = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder of the run. [default: multirun/EXPERIMENT/TIME/0]")
    ] = None,
) -> None:
    """Train with a configuration file."""
    from datetime import datetime

    from poimen_exp import app
    from poimen_exp.solo.plan_source import load_config

    cfg = load_config(config, overrides or [])
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    app.run_in(cfg, folder or Path("multirun", cfg.trainer.experiment_name, time, "0"))
