"""``poimen eval RUN|MODEL [KEY=VALUE ...] --split val|test``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from omegaconf import DictConfig


def evaluate(
    target: Annotated[Path, typer.Argument(help="Folder of a run, or of a model.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE or +experiment=NAME; for a model, corpus.path=DIR too.")
    ] = None,
    adapter: Annotated[Path | None, typer.Option(help="PEFT folder; a run's own adapter if left out.")] = None,
    split: Annotated[Literal["val", "test"], typer.Option(help="test: what training never read.")] = "val",
    samples: Annotated[int, typer.Option(min=1, help="Readings of each task.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the prompted base beside the adapter, between readers with oracle, fixed and position-only gates."""
    from poimen_exp.adapters.publish import adapter_folder

    is_run = (target / "resolved.yaml").is_file()
    if not is_run:
        _require_model(target)
    chosen = _own_adapter(target, is_run) if adapter is None else adapter_folder(adapter)

    from poimen_exp.evaluation.evaluate import evaluate as measure
    from poimen_exp.evaluation.table import print_evaluation, save_evaluation
    from poimen_exp.solo.plan import compile_settings
    from poimen_exp.solo.setup import gate_setup

    settings, _ = compile_settings(_config(target, overrides or [], is_run), placement="report")
    setup = gate_setup(settings.model, settings.gates, settings.corpus, settings.rollout.max_prompt_length)
    result = measure(settings, setup, chosen, split, samples, lambda line: typer.echo(line, err=True))
    if is_run:
        typer.echo(f"written to {save_evaluation(result, target)}", err=True)
    print_evaluation(result, as_json=json)


def _config(target: Path, overrides: list[str], is_run: bool) -> DictConfig:
    from poimen_exp import app
    from poimen_exp.config.compose import compose_config

    if is_run:
        return app.resumed_config(target, overrides)
    return compose_config([*overrides, f"actor_rollout_ref.model.path={target}"])


def _require_model(target: Path) -> None:
    """Refuses a target that is neither a run nor a model, with the path that may be meant."""
    import difflib

    from poimen_exp.errors import Refused

    expected = "expected the folder of a run (multirun/EXPERIMENT/TIME/0) or of a model"
    if target.is_dir():
        if not (target / "config.json").is_file():
            first = target / "0"
            meant = f"; did you mean {first}?" if (first / "resolved.yaml").is_file() else ""
            raise Refused(f"{target}: got neither resolved.yaml nor config.json there, {expected}{meant}")
        return
    gone = next(path for path in (target, *target.parents) if path.parent.is_dir())
    near = difflib.get_close_matches(gone.name, [path.name for path in gone.parent.iterdir()], n=1)
    meant = f"; did you mean {gone.parent / near[0]}?" if near else ""
    raise Refused(f"{target}: no such folder, {expected}{meant}")


def _own_adapter(target: Path, is_run: bool) -> Path | None:
    from poimen_exp.errors import Refused

    if not is_run:
        return None
    folder = target / "adapter"
    if not (folder / "adapter_config.json").is_file():
        raise Refused(f"{target}: the run has no adapter yet; finish it (poimen resume {target}) or give --adapter DIR")
    return folder
