"""Which folder a command gets, with other sweeps at work beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from poimen_exp.errors import Refused
from poimen_exp.sweep import folder as folders
from poimen_exp.sweep.folder import SweepRecord, Wanted, open_sweep
from poimen_exp.sweep.identity import Identity
from poimen_exp.sweep.settings import SweepSettings
from poimen_exp.sweep.space import parse_space
from poimen_exp.sweep.study import slots_of

SETTINGS = SweepSettings("maximize", {}, n_trials=1, n_jobs=None, seed=0, storage=None, resume=None)


def _wanted(folder: Path, is_explicit: bool = False) -> Wanted:
    slots = slots_of(parse_space({}, ["alpha=0.9,1.0"]), 1)
    return Wanted(Identity({"corpus": "c"}, ("alpha",), {}), slots, SETTINGS, folder, is_explicit)


def test_a_named_folder_of_a_sweep_at_its_start_is_held_and_after_a_kill_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = _wanted(tmp_path / "noon", is_explicit=True)

    def second(*_: Any) -> Any:
        with pytest.raises(Refused, match="held by process"):
            open_sweep(wanted)
        raise InterruptedError

    wanted.folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(folders, "newest_study", second)
        with pytest.raises(InterruptedError):
            open_sweep(wanted)
    left = {path.name for path in wanted.folder.iterdir()}
    assert left == {".lock", "study.db"}
    monkeypatch.setattr("poimen_exp.tracking.lock._held", {})  # as in another process, after a kill
    sweep = open_sweep(wanted)
    assert (sweep.folder, sweep.resumed) == (wanted.folder, False)
    sweep.lock.release()


def test_a_named_folder_that_holds_other_files_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(Refused, match="holds files, but no sweep"):
        open_sweep(_wanted(tmp_path, is_explicit=True))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_sweep_that_is_deleted_while_the_folder_is_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        open_sweep(_wanted(tmp_path / name, is_explicit=True)).lock.release()
    read = folders.read_record

    def deleted_first(folder: Path) -> SweepRecord:
        if folder.name == "two":
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr(folders, "read_record", deleted_first)
    sweep = open_sweep(_wanted(tmp_path / "three"))
    assert (sweep.folder, sweep.resumed) == (tmp_path / "one", True)
    sweep.lock.release()


def test_a_damaged_sweep_beside_is_told(tmp_path: Path) -> None:
    open_sweep(_wanted(tmp_path / "one")).lock.release()
    (tmp_path / "one/sweep.json").write_text("{}")
    with pytest.raises(Refused, match="damaged"):
        open_sweep(_wanted(tmp_path / "two"))
