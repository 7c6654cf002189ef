"""An Optuna study as the sweep uses it: slots that are claimed once, trials that are told once."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from poimen_exp.sweep.space import Interval, Point, Space, Value, bare_key
from poimen_exp.tracking.lock import live_holder
from poimen_exp.tracking.result import GOOD, read_result

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from poimen_exp.sweep.settings import Direction, SweepSettings

log = logging.getLogger(__name__)

_DISTINCT_TRIES = 50


@dataclass(frozen=True)
class Slot:
    """A place in a sweep that one completed trial fills.

    ``sample`` is None in a grid; in a search it counts the sampled points, and each of them has one slot for every
    combination of the listed values.
    """

    choices: Point
    sample: int | None

    @property
    def key(self) -> str:
        """Equal for equal places, whatever order and spelling their values came in."""
        parts = [f"{bare_key(key)}={value.identity}" for key, value in self.choices.items()]
        return ",".join(sorted(parts) + ([] if self.sample is None else [f"#{self.sample}"]))


def slots_of(space: Space, n_trials: int) -> tuple[Slot, ...]:
    """Every slot of a sweep: its grid, or the grid once for each sampled point."""
    if not space.intervals:
        return tuple(Slot(point, None) for point in space.grid())
    return tuple(Slot(point, sample) for sample in range(n_trials) for point in space.grid())


@dataclass(frozen=True)
class TrialRow:
    """A trial as a person reads it. ``state`` is Optuna's, in small letters."""

    number: int
    slot: str
    point: dict[str, str]
    state: str
    value: float | None
    folder: Path
    reason: str


class SweepStudy:
    """The trials of a sweep. Several processes may work on one study.

    Args:
        folder: of this sweep; its lock is held.
        seed: of the sampler.
    """

    def __init__(self, study: optuna.Study, folder: Path, seed: int) -> None:
        self._study, self.folder, self._seed = study, folder.absolute(), seed

    def is_complete(self, slots: Sequence[Slot]) -> bool:
        """Whether every slot has a completed trial."""
        return {slot.key for slot in slots} <= self.slots_in(TrialState.COMPLETE)

    def slots_in(self, *states: TrialState) -> set[str]:
        """Keys of the slots that have a trial in one of the states."""
        return {str(trial.user_attrs["slot"]) for trial in self._trials() if trial.state in states}

    def rows(self) -> tuple[TrialRow, ...]:
        """All trials, by number; claims that lost to another process are left out."""
        trials = self._trials()
        reasons = self._study.user_attrs  # after the trials: a reason is written before its trial fails
        return tuple(_row(trial, reasons.get(_reason(trial.number), "")) for trial in trials)

    def claim(self, slot: Slot, intervals: Sequence[Interval]) -> tuple[int, Point] | None:
        """A running trial for the slot, or None where another process has it.

        A claim is one insert; of two for the same slot the lower number stands, and both sides see the same order.
        """
        point = slot.choices | self._sampled(slot, intervals)
        token = uuid.uuid4().hex
        self._study.add_trial(self._running(slot, point, intervals, token))
        rivals = [t for t in self._trials() if t.user_attrs["slot"] == slot.key and t.state in _TAKEN]
        mine = next(t for t in rivals if t.user_attrs["token"] == token)
        if rivals[0].number != mine.number or not self._agrees(mine, slot):
            self.give_up(mine.number)
            return None
        return mine.number, point

    def give_up(self, number: int) -> None:
        """Takes back a claim: the trial is failed and shown nowhere."""
        self._study.set_user_attr(_lost(number), True)
        self._tell(number, None, TrialState.FAIL)

    def complete(self, number: int, value: float) -> None:
        """Tells the value of a trial."""
        self._tell(number, value, TrialState.COMPLETE)

    def fail(self, number: int, reason: str) -> None:
        """Tells that a trial failed; ``reason`` is shown in tables."""
        self._study.set_user_attr(_reason(number), reason)
        self._tell(number, None, TrialState.FAIL)

    def settle_abandoned(self) -> None:
        """Settles what dead sweeps left running: completed where the run had written its result, else failed."""
        for trial in self._trials():
            owner = Path(trial.user_attrs["owner"])
            if trial.state != TrialState.RUNNING or (owner != self.folder and _may_live(owner)):
                continue
            if not self._is_running(trial.number):
                continue  # told by its owner, which ended after the trials were read
            value = finished_value(trial_folder(owner, trial.number))
            if value is not None:
                log.warning("trial %d had finished when its sweep was killed: completed with %g", trial.number, value)
                self.complete(trial.number, value)
            else:
                log.warning("trial %d was left running by a sweep that is gone: failed, to be repeated", trial.number)
                self.fail(trial.number, "its sweep was killed")

    def best_value(self) -> float | None:
        """The best value by the study's direction; None where no trial is complete."""
        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return self._study.best_value if complete else None

    def _tell(self, number: int, value: float | None, state: TrialState) -> None:
        """Tells a trial's end; the end that another process told before stands, even one told this very moment."""
        with suppress(UpdateFinishedTrialError):
            self._study.tell(number, value, state=state, skip_if_finished=True)

    def _is_running(self, number: int) -> bool:
        return any(trial.number == number and trial.state == TrialState.RUNNING for trial in self._trials())

    def _trials(self) -> list[FrozenTrial]:
        trials = self._study.get_trials(deepcopy=False)
        lost = self._study.user_attrs
        return [trial for trial in trials if "slot" in trial.user_attrs and _lost(trial.number) not in lost]

    def _running(self, slot: Slot, point: Point, intervals: Sequence[Interval], token: str) -> FrozenTrial:
        numbers = {bare_key(key): value.number for key, value in point.items() if value.number is not None}
        sampled = {bare_key(axis.key): _distribution(axis) for axis in intervals}
        return create_trial(
            state=TrialState.RUNNING,
            params=numbers,
            # A distribution of one number: a study may hold another one for every trial, so that a grid may grow.
            distributions={key: sampled.get(key, FloatDistribution(n, n)) for key, n in numbers.items()},
            user_attrs={
                "slot": slot.key,
                "sample": slot.sample,
                "point": json.dumps({bare_key(key): value.text for key, value in point.items()}),
                "owner": str(self.folder),
                "token": token,
            },
        )

    def _sampled(self, slot: Slot, intervals: Sequence[Interval]) -> Point:
        """Values of the sampled keys: those of the slot's point where it has a trial already, else a new suggestion."""
        if slot.sample is None:
            return {}
        first = self._first_of(slot.sample)
        if first is not None:
            return {axis.key: _sampled_value(axis, first.params[bare_key(axis.key)]) for axis in intervals}
        return self._suggest(slot.sample, intervals)

    def _suggest(self, sample: int, intervals: Sequence[Interval]) -> Point:
        # Asked of a copy in memory: the shared study sees a trial when its slot, point and owner are known, not before.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        trials = [t for t in self._trials() if t.state in _TAKEN]
        names = [bare_key(axis.key) for axis in intervals]
        seen = {tuple(float(t.params[name]) for name in names) for t in trials}
        values: dict[str, Any] = {}
        for attempt in range(_DISTINCT_TRIES):
            sampler = optuna.samplers.TPESampler(seed=self._seed + sample + 1_000_003 * attempt)
            scratch = optuna.create_study(direction=self._study.direction, sampler=sampler)
            scratch.add_trials(trials)
            values = scratch.ask({bare_key(axis.key): _distribution(axis) for axis in intervals}).params
            if tuple(float(values[name]) for name in names) not in seen:
                break
        return {axis.key: _sampled_value(axis, values[bare_key(axis.key)]) for axis in intervals}

    def _first_of(self, sample: int) -> FrozenTrial | None:
        return next((trial for trial in self._trials() if trial.user_attrs["sample"] == sample), None)

    def _agrees(self, mine: FrozenTrial, slot: Slot) -> bool:
        """Whether the trial has the point that the first trial of its sample has: two processes may have sampled."""
        first = None if slot.sample is None else self._first_of(slot.sample)
        sampled = [k for k, d in mine.distributions.items() if not d.single()]
        return first is None or all(first.params[key] == mine.params[key] for key in sampled)


_TAKEN = (TrialState.RUNNING, TrialState.COMPLETE)


def open_study(storage: BaseStorage, name: str, direction: Direction) -> optuna.Study:
    """The study of that name, made if it is not there."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)


def newest_study(
    storage: BaseStorage, fingerprint: str, settings: SweepSettings, folder: Path, slots: Sequence[Slot]
) -> tuple[str, SweepStudy]:
    """Name and study for a new folder: the first generation of this fingerprint that is not complete in the storage.

    A storage of the folder's own has none yet. A shared one may hold the study of a live sweep, which this one joins,
    or of a finished one, which is left as it is.
    """
    known = {summary.study_name for summary in optuna.get_all_study_summaries(storage)}
    generation = 1
    while True:
        name = f"poimen-{fingerprint[:16]}" + (f"-{generation}" if generation > 1 else "")
        study = SweepStudy(open_study(storage, name, settings.direction), folder, settings.seed)
        if name not in known or not study.is_complete(slots):
            return name, study
        generation += 1


def trial_folder(sweep: Path, number: int) -> Path:
    """Run folder of a trial."""
    return sweep / str(number)


def _may_live(owner: Path) -> bool:
    # A folder that this machine does not see belongs to another one, which may well be at work.
    return not owner.is_dir() or live_holder(owner) is not None


def finished_value(folder: Path) -> float | None:
    """The objective of a run that ended well, from its ``result.json``; None where there is none."""
    result = read_result(folder / "result.json")
    return result.objective_value if result is not None and result.status in GOOD else None


def _distribution(axis: Interval) -> BaseDistribution:
    if axis.is_int:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def _sampled_value(axis: Interval, number: float) -> Value:
    return Value(str(int(number)) if axis.is_int else repr(float(number)), float(number))


def _lost(number: int) -> str:
    return f"lost claim of trial {number}"


def _reason(number: int) -> str:
    return f"why trial {number} failed"


def _row(trial: FrozenTrial, reason: str) -> TrialRow:
    attributes = trial.user_attrs
    return TrialRow(
        number=trial.number,
        slot=attributes["slot"],
        point=json.loads(attributes["point"]),
        state=trial.state.name.lower(),
        value=trial.value if trial.state == TrialState.COMPLETE else None,
        folder=trial_folder(Path(attributes["owner"]), trial.number),
        reason=reason if trial.state == TrialState.FAIL else "",
    )
