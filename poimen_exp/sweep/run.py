"""A sweep from its command line to its table: check, folder, trials."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf, read_write
from optuna.trial import TrialState

from poimen_exp.errors import PoimenError, RunFailed
from poimen_exp.sweep import gate
from poimen_exp.sweep.folder import OpenSweep, Wanted, open_sweep
from poimen_exp.sweep.identity import identify
from poimen_exp.sweep.records import write_trials
from poimen_exp.sweep.settings import SweepSettings
from poimen_exp.sweep.space import Point, Space, overrides_of, parse_space
from poimen_exp.sweep.study import Slot, finished_value, slots_of, trial_folder
from poimen_exp.sweep.summary import print_summary
from poimen_exp.sweep.task import ERROR_FILE, TrialTask, finite, write_error
from poimen_exp.wording import counted

if TYPE_CHECKING:
    from hydra.plugins.launcher import Launcher
    from hydra.types import HydraContext, TaskFunction

log = logging.getLogger(__name__)

_SWEEP_DIR = "hydra.sweep.dir"


@dataclass(frozen=True)
class Claimed:
    """A trial that this process runs."""

    number: int
    slot: Slot
    point: Point


def run_sweep(
    settings: SweepSettings,
    context: HydraContext,
    task: TaskFunction,
    config: DictConfig,
    arguments: Sequence[str],
) -> float | None:
    """Runs what is missing of a sweep and prints all its trials; returns the best value.

    Raises:
        Refused: before any folder, study or database: overrides, composition, gate check.
        RunFailed: at the end, if a trial failed and its place in the sweep is still empty.
    """
    loader = context.config_loader
    space = parse_space(settings.params, arguments, loader)
    base = loader.load_sweep_config(config, list(space.fixed))
    HydraConfig.instance().set_config(config)
    gate.check_before_sweep(_compose_values(context, config, space))
    return _run(_wanted(settings, config, base, space), space, context, task, config)


def _compose_values(context: HydraContext, config: DictConfig, space: Space) -> list[DictConfig]:
    """The sweep's first trial, then one config for each further value of each axis: a wrong value is met here.

    A sampled key has the value of the base config.
    """
    first = next(space.grid())
    points = [first]
    for axis in space.choices:
        points += [first | {axis.key: value} for value in axis.values[1:]]
    return [context.config_loader.load_sweep_config(config, [*space.fixed, *overrides_of(p)]) for p in points]


def _wanted(settings: SweepSettings, config: DictConfig, base: DictConfig, space: Space) -> Wanted:
    explicit = any(line.partition("=")[0] == _SWEEP_DIR for line in config.hydra.overrides.hydra)
    return Wanted(
        identity=identify(base, space),
        slots=slots_of(space, settings.n_trials),
        settings=settings,
        folder=Path(str(config.hydra.sweep.dir)),
        is_explicit=explicit,
    )


def _run(wanted: Wanted, space: Space, context: HydraContext, task: TaskFunction, config: DictConfig) -> float | None:
    sweep = open_sweep(wanted)
    try:
        _announce(sweep, wanted, space)
        sweep.study.settle_abandoned()
        launcher = _launcher(sweep.folder, context, TrialTask(task), config)
        batch_size = wanted.settings.n_jobs or _batch_size(config, wanted)
        try:
            _write_trials(sweep, wanted)
            for batch in _batches(sweep, wanted.slots, space, batch_size):
                _run_batch(sweep, launcher, space, batch)
                _write_trials(sweep, wanted)
        finally:
            _write_trials(sweep, wanted)
            print_summary(sweep.study.rows(), sweep.folder)
        return _ending(sweep, wanted)
    finally:
        sweep.lock.release()


def _write_trials(sweep: OpenSweep, wanted: Wanted) -> None:
    rows = [asdict(row) | {"folder": str(row.folder)} for row in sweep.study.rows()]
    write_trials(sweep.folder, [slot.key for slot in wanted.slots], rows)


def _announce(sweep: OpenSweep, wanted: Wanted, space: Space) -> None:
    done = len({slot.key for slot in wanted.slots} & sweep.study.slots_in(TrialState.COMPLETE))
    verb = "goes on in" if sweep.resumed else "runs in"
    keys = ", ".join(space.keys) or "no key: one trial"
    log.info("the sweep over %s %s %s", keys, verb, sweep.folder)
    log.info("%s, %d of them complete", counted(len(wanted.slots), "trial"), done)


def _launcher(folder: Path, context: HydraContext, task: TrialTask, config: DictConfig) -> Launcher:
    """The configured launcher, made now: its own settings may hold the sweep's folder."""
    with read_write(config.hydra):
        config.hydra.sweep.dir = str(folder)
        # Jobs are composed anew from these lines.
        kept = [line for line in config.hydra.overrides.hydra if line.partition("=")[0] != _SWEEP_DIR]
        config.hydra.overrides.hydra = [*kept, f"{_SWEEP_DIR}={_quoted(folder)}"]
    if not (folder / "multirun.yaml").exists():
        OmegaConf.save(config, folder / "multirun.yaml")
    return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _batch_size(config: DictConfig, wanted: Wanted) -> int:
    if str(config.hydra.launcher._target_).endswith(".BasicLauncher"):
        return 1
    if wanted.slots[0].sample is not None:
        log.info("sampled trials run one by one; hydra.sweeper.n_jobs=N gives the launcher N at once")
        return 1
    return len(wanted.slots)


def _batches(sweep: OpenSweep, slots: Sequence[Slot], space: Space, size: int) -> Iterator[list[Claimed]]:
    """Claims what is missing, ``size`` trials at a time; a slot is tried once a run of this command."""
    tried: set[str] = set()
    while True:
        taken = tried | sweep.study.slots_in(TrialState.RUNNING, TrialState.COMPLETE)
        missing = [slot for slot in slots if slot.key not in taken]
        batch: list[Claimed] = []
        for slot in missing:
            claimed = _claim(sweep, slot, space)
            if claimed is not None:
                tried.add(slot.key)
                batch.append(claimed)
            if len(batch) == size:
                break
        if batch:
            yield batch
        elif not missing:
            return


def _claim(sweep: OpenSweep, slot: Slot, space: Space) -> Claimed | None:
    claim = sweep.study.claim(slot, space.intervals)
    if claim is None:
        return None
    number, point = claim
    if trial_folder(sweep.folder, number).exists():
        # A storage that was emptied counts from 0 again; what lies in the folder is never written over.
        sweep.study.give_up(number)
        return None
    return Claimed(number, slot, point)


def _run_batch(sweep: OpenSweep, launcher: Launcher, space: Space, batch: Sequence[Claimed]) -> None:
    jobs = [[*space.fixed, *overrides_of(trial.point), f"hydra.sweep.subdir='{trial.number}'"] for trial in batch]
    try:
        returns = launcher.launch(jobs, initial_job_idx=batch[0].number)
    except KeyboardInterrupt:
        for trial in batch:
            sweep.study.fail(trial.number, "interrupted")
        raise
    except Exception as error:  # the run boundary: a worker that died takes its batch along, not the sweep
        log.error("the launcher failed: %s", error)
        for trial in batch:
            _tell_lost(sweep, trial, error)
        return
    for trial, ended in zip(batch, returns, strict=True):
        _tell(sweep, trial, ended)


def _tell(sweep: OpenSweep, trial: Claimed, ended: JobReturn) -> None:
    try:
        value = finite(ended.return_value)
    except Exception as error:  # the run boundary: one failed trial is a row of the table
        _tell_failed(sweep, trial, error)
    else:
        sweep.study.complete(trial.number, value)


def _tell_lost(sweep: OpenSweep, trial: Claimed, error: Exception) -> None:
    """Of a batch whose launcher died, the runs that had ended well keep their value."""
    value = finished_value(trial_folder(sweep.folder, trial.number))
    if value is None:
        _tell_failed(sweep, trial, error)
    else:
        sweep.study.complete(trial.number, value)


def _tell_failed(sweep: OpenSweep, trial: Claimed, error: Exception) -> None:
    folder = trial_folder(sweep.folder, trial.number)
    write_error(folder, error)
    sweep.study.fail(trial.number, _one_line(error))
    log.error("trial %d failed: %s (%s)", trial.number, _one_line(error), folder / ERROR_FILE)


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, PoimenError) else f"{type(error).__name__}: {text}"


def _ending(sweep: OpenSweep, wanted: Wanted) -> float | None:
    """The best value, if nothing of this command failed."""
    # One reading of both states: between two, a trial that another process completes would be in neither.
    taken = sweep.study.slots_in(TrialState.RUNNING, TrialState.COMPLETE)
    running = taken - sweep.study.slots_in(TrialState.COMPLETE)
    keys = [slot.key for slot in wanted.slots]
    empty = [key for key in keys if key not in taken]
    elsewhere = sum(key in running for key in keys)
    if elsewhere:
        log.info("%s running in another process", counted(elsewhere, "trial"))
    if empty:
        raise RunFailed(
            f"{len(empty)} of {len(keys)} trials failed: {'; '.join(empty)}. Tracebacks: error.txt in their folders in "
            f"{sweep.folder}. The same command runs them again."
        )
    return sweep.study.best_value()
