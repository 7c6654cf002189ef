"""One run from its composed configuration to its exit: checks, backend, records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from poimen_exp.config.keys import check_keys
from poimen_exp.config.paths import register_resolvers
from poimen_exp.config.schema import MISSING_CORPUS, PoimenKeys, typed_keys
from poimen_exp.config.tree import MISSING, check_verl_version, resolved
from poimen_exp.errors import Refused, RunFailed

if TYPE_CHECKING:
    from poimen_exp.corpus import Corpus
    from poimen_exp.gates.check_report import GateCheckReport
    from poimen_exp.solo.plan import FieldPlan
    from poimen_exp.solo.settings import LossSettings, SoloSettings
    from poimen_exp.solo.setup import Setup
    from poimen_exp.tracking.result import RunResult
    from poimen_exp.tracking.run_folder import RunFolder
    from poimen_exp.tracking.tracker import Tracker

REFUSED_ROOT = Path("multirun")
"""Where the report of a refused gate check goes: ``multirun/refused/<time>/``."""


@dataclass(frozen=True)
class SoloRun:
    """What a solo run reads, checked."""

    settings: SoloSettings
    plan: tuple[FieldPlan, ...]
    setup: Setup


@dataclass(frozen=True)
class Checked:
    """A configuration that may be trained.

    Attributes:
        corpus: of the gates; None where prompts are trained on.
        solo: None where verl is the backend.
    """

    keys: PoimenKeys
    corpus: Corpus | None
    report: GateCheckReport
    solo: SoloRun | None


def check(cfg: DictConfig) -> Checked:
    """Everything that can be refused before work: keys, values, plan, model folder, corpus, gate check.

    Nothing of a run is written. Asking again about the same configuration costs nothing.

    Raises:
        Refused: with what is wrong. A failed gate check leaves its report under ``multirun/refused/<time>/``.
    """
    return _checked(_Asked(OmegaConf.to_yaml(cfg), cfg))


@dataclass(frozen=True)
class _Asked:
    """A configuration, known by its text."""

    text: str
    cfg: DictConfig = field(compare=False)


@lru_cache(maxsize=1)
def _checked(asked: _Asked) -> Checked:
    cfg = asked.cfg
    check_verl_version()
    check_keys(cfg)
    if typed_keys(resolved(cfg)).tracking.wandb == "online":
        from poimen_exp.tracking.wandb_online import require_online

        require_online()
    return _check_solo(cfg) if cfg.backend == "solo" else _check_verl(cfg)


def _check_solo(cfg: DictConfig) -> Checked:
    from poimen_exp.solo.plan import compile_settings

    settings, plan = compile_settings(cfg)
    if settings.corpus is not None:
        from poimen_exp.corpus.manifest import require_corpus

        require_corpus(settings.corpus.path)
    from poimen_exp.solo.policy import pick_device

    pick_device(settings.device)
    keys = typed_keys(resolved(cfg))
    if settings.prompts is not None:
        return _check_prompts(keys, settings, tuple(plan))
    from poimen_exp.adapters.preflight import check_before_publishing, check_before_training
    from poimen_exp.solo.setup import gate_setup, require_full_batch

    model = settings.model
    setup = gate_setup(model, settings.gates, settings.corpus, settings.rollout.max_prompt_length)
    check_before_training(model.path, model.lora_rank, model.lora_alpha, model.target_modules, model.adapter)
    check_before_publishing(keys.adapter.registry, keys.adapter.name)
    require_full_batch(settings, setup.train_size)
    report = _gate_check(keys, setup.corpus, settings.loss)
    return Checked(keys, setup.corpus, report, SoloRun(settings, tuple(plan), setup))


def _check_prompts(keys: PoimenKeys, settings: SoloSettings, plan: tuple[FieldPlan, ...]) -> Checked:
    from poimen_exp.adapters.preflight import check_before_publishing, check_before_training
    from poimen_exp.solo.check import check_learning
    from poimen_exp.solo.prompt_setup import prompt_setup
    from poimen_exp.solo.setup import require_full_batch

    model = settings.model
    setup = prompt_setup(settings)
    require_full_batch(settings, setup.train_size)
    check_before_training(model.path, model.lora_rank, model.lora_alpha, model.target_modules, model.adapter)
    check_before_publishing(keys.adapter.registry, keys.adapter.name)
    return Checked(keys, None, _passed(check_learning(settings)), SoloRun(settings, plan, setup))


def _check_verl(cfg: DictConfig) -> Checked:
    keys = typed_keys(resolved(cfg))
    if keys.corpus.path == MISSING:
        raise Refused(MISSING_CORPUS)
    from poimen_exp.adapters.preflight import check_before_publishing
    from poimen_exp.corpus.manifest import require_corpus

    require_corpus(Path(keys.corpus.path))
    from poimen_exp.verl_backend.preflight import preflight
    from poimen_exp.verl_backend.reader import open_reader
    from poimen_exp.verl_backend.settings import loss_settings, settings_of

    preflight(cfg)
    check_before_publishing(keys.adapter.registry, keys.adapter.name)
    corpus = open_reader(settings_of(cfg).reader).corpus
    return Checked(keys, corpus, _gate_check(keys, corpus, loss_settings(cfg)), None)


def _gate_check(keys: PoimenKeys, corpus: Corpus, loss: LossSettings | None) -> GateCheckReport:
    from poimen_exp.gates.check import GateCheckSettings, run_gate_check

    rules = GateCheckSettings(
        alpha=keys.alpha,
        turn_baseline=keys.advantage.turn_baseline,
        on_unparsed=keys.gates.on_unparsed,
        matcher=keys.gates.matcher,
        loss=loss,
    )
    return _passed(run_gate_check(corpus.split("train"), rules))


def _passed(report: GateCheckReport) -> GateCheckReport:
    from poimen_exp.gates.check import write_refused_report

    if not report.passed:
        write_refused_report(report, REFUSED_ROOT)
        report.require()
    return report


def run(cfg: DictConfig) -> float | None:
    """A new run in the folder that Hydra made; its value is the best ``val/reward/total``.

    Raises:
        Refused: see ``check``.
        RunFailed: the run began and could not end well.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()  # its mode is RUN, or in a trial of a sweep MULTIRUN or None
    return run_in(cfg, Path(hydra.runtime.output_dir), swept=hydra.mode != RunMode.RUN).objective_value


def run_in(cfg: DictConfig, path: Path, swept: bool = False) -> RunResult:
    """A new run in ``path``, without Hydra: of a file that ``poimen plan --out`` or ``poimen export-verl`` wrote.

    Args:
        swept: it is a trial: stopped, it goes on by the command of its sweep.
    """
    from poimen_exp.tracking.run_folder import RunFolder

    checked = check(cfg)
    with RunFolder.create(path) as folder, _way_on(folder, swept):
        return _train(cfg, checked, folder, resume=False)


def resume(path: Path, overrides: Sequence[str] = ()) -> RunResult:
    """Goes on with the run in ``path`` from its newest complete checkpoint.

    Args:
        overrides: ``key=value`` on top of the run's own configuration, as more steps.

    Raises:
        Refused: no run lies there, or it was started as another one; nothing of it is touched.
    """
    from poimen_exp.tracking.run_folder import RunFolder

    cfg = resumed_config(path, overrides)
    found = RunFolder.open(path, "read")
    _refuse_fewer_steps(cfg, found)
    if cfg.backend == "solo":
        from poimen_exp.solo.plan import compile_settings
        from poimen_exp.solo.run import require_same_run

        require_same_run(compile_settings(cfg)[0], None, found)
    checked = check(cfg)
    if checked.solo is not None:
        require_same_run(checked.solo.settings, checked.solo.setup, found)
    with RunFolder.open(path, "resume") as folder, _way_on(folder):
        return _train(cfg, checked, folder, resume=True)


def _refuse_fewer_steps(cfg: DictConfig, folder: RunFolder) -> None:
    """Refuses a total below the last recorded step, but that of the newest checkpoint: it ends the run there."""
    total, saved = cfg.trainer.total_training_steps, folder.checkpoint_steps()[-1:]
    last = max((line.step for line in folder.read_lines()), default=0)
    if isinstance(total, int) and total < last and total not in saved:  # what is no number the check refuses
        end = "".join(f", or {step}, the newest checkpoint's, to end there" for step in saved if step < last)
        raise Refused(
            f"trainer.total_training_steps: got {total}, but step {last} is in the record of {folder.path}; "
            f"expected {last} or more{end}"
        )


def resumed_config(path: Path, overrides: Sequence[str]) -> DictConfig:
    """The configuration of a run, with overrides.

    Raises:
        Refused: no run lies there; a key that the run does not have.
    """
    file = path / "resolved.yaml"
    if not file.is_file():
        one = path / "0"
        of_several = f"; did you mean {one}? A sweep goes on by the command that began it" if one.is_dir() else ""
        raise Refused(f"{path}: no run lies here; expected a folder with resolved.yaml{of_several}")
    from poimen_exp.config.compose import override

    cfg = OmegaConf.load(file)
    if not isinstance(cfg, DictConfig):
        raise Refused(f"{file}: damaged: expected a mapping")
    return override(cfg, overrides)


def _train(cfg: DictConfig, checked: Checked, folder: RunFolder, resume: bool) -> RunResult:
    """Records around a backend. A collapse stop is a failed run that keeps its result."""
    from poimen_exp.tracking.progress import ProgressLine, print_results
    from poimen_exp.tracking.result import GOOD
    from poimen_exp.tracking.tracker import Tracker, say_on_stderr

    register_resolvers()
    values = resolved(cfg)
    say_on_stderr(f"run folder: {_near(folder.path)}")
    checked = _record(folder, cfg, checked)
    listeners = [ProgressLine(int(values["trainer"]["total_training_steps"]))]
    with Tracker(folder, checked.keys.tracking, values, listeners) as tracker:
        tracker.describe(_provenance(checked, values))
        result = _backend(cfg, checked, folder, tracker, resume)
        folder.write_result(result)
        tracker.finish(result.status)
    start = "warm start" if checked.keys.gates.warm_start.steps else "base"
    print_results(folder.read_lines(), result.best_step, start)
    _publish(checked, folder)
    print(f"run folder: {_near(folder.path)}")
    if result.status not in GOOD:
        raise RunFailed(f"{folder.path}: the run ended as {result.status!r}; its records and checkpoints are kept")
    return result


@contextmanager
def _way_on(folder: RunFolder, swept: bool = False) -> Iterator[None]:
    """Ctrl-C ends with where the run stands and how it goes on."""
    from poimen_exp.tracking.tracker import say_on_stderr

    try:
        yield
    except KeyboardInterrupt:
        steps = [line.step for line in folder.read_lines()]
        way = "the sweep's command again" if swept else f"poimen resume {_near(folder.path)}"
        if folder.resolved.is_file():
            say_on_stderr(f"stopped after step {max(steps, default=0)}; go on with: {way}")
        raise


def _near(path: Path) -> Path:
    """The path as one types it from here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _record(folder: RunFolder, cfg: DictConfig, checked: Checked) -> Checked:
    """Writes what is known before the first step; gives the run back with what its estimate decided."""
    folder.write_resolved(OmegaConf.to_yaml(cfg, resolve=True))
    folder.write_gate_check(checked.report.to_json())
    if checked.solo is None:
        return checked
    from poimen_exp.solo.dry import cost
    from poimen_exp.solo.plan import plan_json
    from poimen_exp.tracking.tracker import say_on_stderr

    found = cost(checked.solo.settings, checked.solo.setup, _steps_done(checked.solo.settings, folder))
    folder.write_plan({**plan_json(checked.solo.plan), "estimate": found.estimate})
    for line in found.told:
        say_on_stderr(line)
    return replace(checked, solo=replace(checked.solo, settings=found.settings))


def _steps_done(settings: SoloSettings, folder: RunFolder) -> int:
    """Steps behind a run that goes on from its own newest checkpoint, or from another run's; 0 for a new one."""
    own = folder.checkpoint_steps()
    if own or settings.trainer.resume_from is None:
        return own[-1] if own else 0
    from poimen_exp.solo.checkpoint import load_progress

    return load_progress(settings.trainer.resume_from)[0].step


def _provenance(checked: Checked, values: Mapping[str, Any]) -> Any:
    from poimen_exp.tracking.provenance import CorpusFacts, collect_provenance, describe_device

    corpus = checked.corpus
    if checked.solo is None:
        device = str(values["trainer"]["device"])
    else:
        from poimen_exp.solo.policy import pick_device

        device = str(pick_device(checked.solo.settings.device))
    facts = None if corpus is None else CorpusFacts(corpus.corpus_id, corpus.sha256, corpus.label_status)
    identity = {} if checked.solo is None else checked.solo.setup.identity(checked.solo.settings)
    return collect_provenance(seed=checked.keys.seed, device=describe_device(device), corpus=facts, identity=identity)


def _backend(cfg: DictConfig, checked: Checked, folder: RunFolder, tracker: Tracker, resume: bool) -> RunResult:
    if checked.solo is None:
        from poimen_exp.verl_backend.run import run_verl

        return run_verl(cfg, folder, tracker)
    from poimen_exp.solo.run import run_solo
    from poimen_exp.tracking.tracker import say_on_stderr

    return run_solo(checked.solo.settings, checked.solo.setup, tracker, say_on_stderr, resume)


def _publish(checked: Checked, folder: RunFolder) -> None:
    """Publishes the adapter where ``adapter.registry`` says."""
    if checked.keys.adapter.registry is None:
        return
    from poimen_exp.adapters.publish import publish_adapter
    from poimen_exp.adapters.registry import Registry

    published, _ = publish_adapter(folder.path, checked.keys.adapter.name, Registry(checked.keys.adapter.registry))
    print(f"published {published}")
