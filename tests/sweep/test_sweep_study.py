"""Claims on one study from two sides, without processes."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest
from optuna.trial import TrialState

from poimen_exp.sweep import run, study
from poimen_exp.sweep.folder import OpenSweep, Wanted
from poimen_exp.sweep.space import parse_space
from poimen_exp.sweep.storage import open_storage
from poimen_exp.sweep.study import Slot, SweepStudy, open_study, slots_of
from poimen_exp.tracking.lock import FolderLock

GRID = parse_space({}, ["alpha=0.9,1.0", "lora=small,large"])
SEARCH = parse_space({}, ["alpha=interval(0.0,1.0)", "seed=1,2"])


def _sides(tmp_path: Path) -> tuple[SweepStudy, SweepStudy]:
    storage = optuna.storages.InMemoryStorage()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, other = (SweepStudy(open_study(storage, "s", "maximize"), tmp_path / name, 0) for name in ("a", "b"))
    return one, other


def _stored_sides(tmp_path: Path, url: str) -> tuple[SweepStudy, SweepStudy]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, other = (
        SweepStudy(open_study(open_storage(url.format(tmp_path), tmp_path), "s", "maximize"), tmp_path / name, 0)
        for name in ("a", "b")
    )
    return one, other


def _claim(side: SweepStudy, slot: Slot) -> int:
    claimed = side.claim(slot, SEARCH.intervals if slot.sample is not None else ())
    assert claimed is not None
    return claimed[0]


def test_a_slot_is_claimed_once_and_a_lost_claim_is_shown_nowhere(tmp_path: Path) -> None:
    one, other = _sides(tmp_path)
    slot = slots_of(GRID, 0)[0]
    number = _claim(one, slot)
    assert other.claim(slot, ()) is None
    assert [row.number for row in other.rows()] == [number]
    one.complete(number, 0.5)
    assert other.claim(slot, ()) is None
    assert one.slots_in(TrialState.COMPLETE) == {slot.key}
    assert not one.is_complete(slots_of(GRID, 0))


def test_a_trial_that_another_process_completes_while_a_sweep_ends_is_not_called_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = _sides(tmp_path)
    slots = slots_of(GRID, 0)
    for slot in slots[:-1]:
        one.complete(_claim(one, slot), 0.5)
    last = _claim(other, slots[-1])
    sweep, wanted = cast("OpenSweep", SimpleNamespace(study=one)), cast("Wanted", SimpleNamespace(slots=slots))
    with caplog.at_level(logging.INFO):
        assert run._ending(sweep, wanted) == 0.5
    assert caplog.messages == ["1 trial running in another process"]

    read = one.slots_in

    def read_and_be_overtaken(*states: TrialState) -> set[str]:
        keys = read(*states)
        other.complete(last, 0.7)
        return keys

    monkeypatch.setattr(one, "slots_in", read_and_be_overtaken)
    assert run._ending(sweep, wanted) == 0.7


def test_a_failed_slot_can_be_claimed_again(tmp_path: Path) -> None:
    one, other = _sides(tmp_path)
    slot = slots_of(GRID, 0)[0]
    one.fail(_claim(one, slot), "it burned")
    assert _claim(other, slot) == 1
    assert [(row.state, row.reason) for row in one.rows()] == [("fail", "it burned"), ("running", "")]


def test_numbers_are_floats_in_the_study_so_that_a_grid_may_grow(tmp_path: Path) -> None:
    one, _ = _sides(tmp_path)
    for slot in slots_of(parse_space({}, ["alpha=1,0.5", "lora=a,b"]), 0):
        _claim(one, slot)
    _claim(one, slots_of(parse_space({}, ["alpha=0.7,0.8", "lora=c"]), 0)[0])
    assert [row.point for row in one.rows()][-1] == {"alpha": "0.7"}
    params = [trial.params for trial in one._study.get_trials()]
    assert [p["alpha"] for p in params] == [1.0, 1.0, 0.5, 0.5, 0.7]


def test_the_slots_of_a_sample_share_its_value_whoever_claims_them(tmp_path: Path) -> None:
    one, other = _sides(tmp_path)
    first, second, third, _ = slots_of(SEARCH, 2)
    claims = [side.claim(slot, SEARCH.intervals) for side, slot in ((one, first), (other, second), (one, third))]
    values = [claim[1]["alpha"].text for claim in claims if claim is not None]
    assert values[0] == values[1] != values[2]


def test_the_sampler_learns_from_what_was_told(tmp_path: Path) -> None:
    one, _ = _sides(tmp_path)
    space = parse_space({}, ["alpha=interval(0.0,1.0)"])
    for slot in slots_of(space, 40):
        claimed = one.claim(slot, space.intervals)
        assert claimed is not None
        one.complete(claimed[0], -abs(float(claimed[1]["alpha"].text) - 0.2))
    values = [float(row.point["alpha"]) for row in one.rows()]
    # Uniform sampling would be 0.35 off on average (0.2^2 / 2 + 0.8^2 / 2 = 0.34).
    assert sum(abs(value - 0.2) for value in values[20:]) / 20 < 0.15
    assert len(set(values)) == 40


def test_a_small_space_of_integers_is_used_up_before_a_value_comes_twice(tmp_path: Path) -> None:
    one, _ = _sides(tmp_path)
    space = parse_space({}, ["k=int(interval(1,4))"])
    for slot in slots_of(space, 4):
        claimed = one.claim(slot, space.intervals)
        assert claimed is not None
        one.complete(claimed[0], 0.0)
    assert sorted(row.point["k"] for row in one.rows()) == ["1", "2", "3", "4"]


def test_only_the_trials_of_dead_sweeps_are_settled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = _sides(tmp_path)
    live, dead = slots_of(GRID, 0)[:2]
    _claim(one, live)
    _claim(other, dead)
    lock = FolderLock(tmp_path / "a")
    try:
        with caplog.at_level(
            logging.WARNING, SweepStudy.__module__
        ):  # other tests' libraries set the root logger's level
            other.settle_abandoned()
    finally:
        lock.release()
    assert [row.state for row in one.rows()] == ["running", "fail"]
    assert "trial 1 was left running" in caplog.text
    other.settle_abandoned()
    assert [row.state for row in one.rows()] == ["fail", "fail"]


@pytest.mark.parametrize("storage", ["sqlite:///{}/study.db", "journal://{}/journal"])
def test_two_sweeps_settle_one_abandoned_trial_at_once(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = _stored_sides(tmp_path, storage)
    (tmp_path / "dead").mkdir()
    dead = SweepStudy(one._study, tmp_path / "dead", 0)
    _claim(dead, slots_of(GRID, 0)[0])
    write = one._study._storage.set_trial_state_values

    def write_second(*given: Any, **more: Any) -> Any:
        monkeypatch.undo()
        other.settle_abandoned()
        return write(*given, **more)

    monkeypatch.setattr(one._study._storage, "set_trial_state_values", write_second)
    one.settle_abandoned()
    assert [(row.state, row.reason) for row in one.rows()] == [("fail", "its sweep was killed")]


def test_a_trial_that_its_owner_tells_while_it_is_settled_keeps_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = _sides(tmp_path)
    failed, complete = (_claim(other, slot) for slot in slots_of(GRID, 0)[:2])

    def ends_now(_owner: Path) -> bool:
        other.fail(failed, "it burned")
        other.complete(complete, 0.5)
        return False

    monkeypatch.setattr(study, "_may_live", ends_now)
    one.settle_abandoned()
    assert [(row.state, row.value, row.reason) for row in one.rows()] == [
        ("fail", None, "it burned"),
        ("complete", 0.5, ""),
    ]
    assert caplog.messages == []


def test_a_trial_that_fails_while_rows_are_read_has_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = _sides(tmp_path)
    number, read = _claim(other, slots_of(GRID, 0)[0]), one._trials

    def fails_now() -> Any:
        other.fail(number, "it burned")
        return read()

    monkeypatch.setattr(one, "_trials", fails_now)
    assert [(row.state, row.reason) for row in one.rows()] == [("fail", "it burned")]


def test_the_direction_is_read_from_the_one_place_it_is_declared_in(tmp_path: Path) -> None:
    study = SweepStudy(open_study(optuna.storages.InMemoryStorage(), "s", "minimize"), tmp_path, 0)
    assert study.best_value() is None
    for slot, value in zip(slots_of(GRID, 0), (0.3, 0.1, 0.2), strict=False):
        study.complete(_claim(study, slot), value)
    assert study.best_value() == 0.1
