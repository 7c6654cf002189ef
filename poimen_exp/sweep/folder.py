"""The folder of a sweep: found again by fingerprint, held by a lock, described by ``sweep.json``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poimen_exp.errors import PoimenError, Refused
from poimen_exp.sweep.identity import Identity, identity_differences
from poimen_exp.sweep.settings import SweepSettings
from poimen_exp.sweep.storage import DATABASE_NAME, open_storage, shown
from poimen_exp.sweep.study import Slot, SweepStudy, newest_study, open_study
from poimen_exp.tracking.files import new_folder, read_json, write_json
from poimen_exp.tracking.lock import LOCK_NAME, FolderLock, live_holder

log = logging.getLogger(__name__)

SWEEP_FILE = "sweep.json"
SWEEP_SCHEMA = "poimen.sweep/1"


@dataclass(frozen=True)
class SweepRecord:
    """What ``sweep.json`` says."""

    identity: Identity
    direction: str
    storage: str | None
    """As in ``sweep.storage``, its password starred out."""
    study_name: str


@dataclass(frozen=True)
class OpenSweep:
    """A sweep that this process may work on until it releases the lock."""

    folder: Path
    lock: FolderLock
    study: SweepStudy
    resumed: bool


@dataclass(frozen=True)
class Wanted:
    """The sweep that a command asks for."""

    identity: Identity
    slots: tuple[Slot, ...]
    settings: SweepSettings
    folder: Path
    """Where a new sweep goes."""
    is_explicit: bool
    """Whether the user named that folder (``hydra.sweep.dir`` on the command line)."""


def open_sweep(wanted: Wanted) -> OpenSweep:
    """The forced folder, or else the newest unfinished one of this sweep, or else a new one.

    Raises:
        Refused: a forced folder that is none of this sweep, or that a live process holds.
    """
    if wanted.settings.resume is not None:
        return _forced(wanted.settings.resume, "sweep.resume", wanted)
    if wanted.is_explicit and (wanted.folder / SWEEP_FILE).is_file():
        return _forced(wanted.folder, "hydra.sweep.dir", wanted)
    finished: Path | None = None
    if not wanted.is_explicit:
        for folder, record in _newest_first(wanted.folder.parent):
            found = _continue(folder, record, wanted)
            if found is None:
                continue
            if not found.study.is_complete(wanted.slots):
                return found
            found.lock.release()
            finished = finished or folder
    if finished is not None:
        log.warning(
            "%s: this sweep is finished there, and all its trials run again in a new folder. To read it: poimen report "
            "%s; to add to it: more values or trials; for its table: the same command with sweep.resume=%s",
            *[finished] * 3,
        )
    return _new(wanted)


def read_record(folder: Path) -> SweepRecord:
    """What a sweep's folder says about itself.

    Raises:
        Refused: no sweep lies there, or its description is damaged.
    """
    path = folder / SWEEP_FILE
    if not path.is_file():
        raise Refused(f"{folder}: no sweep lies here; expected a folder with {SWEEP_FILE}")
    data: Any = read_json(path)
    try:
        identity = Identity(data["base"], tuple(data["swept"]), data["intervals"])
        return SweepRecord(identity, data["direction"], data["storage"], data["study_name"])
    except (KeyError, TypeError) as error:
        raise Refused(f"{path}: damaged: {error!r}; expected base, swept, intervals, direction, storage") from error


def _forced(folder: Path, key: str, wanted: Wanted) -> OpenSweep:
    record = read_record(folder)
    lines = _mismatch(record, wanted)
    if lines:
        listed = "\n  ".join(lines)
        raise Refused(
            f"{key}={folder}: this command is another sweep than the one in the folder; these keys differ:\n  "
            f"{listed}\n"
            f"Give them the folder's values, or leave {key} out for a new folder."
        )
    return OpenSweep(folder.absolute(), FolderLock(folder), _study_of(record, folder, wanted), resumed=True)


def _continue(folder: Path, record: SweepRecord, wanted: Wanted) -> OpenSweep | None:
    """The sweep in the folder, locked, if it is the wanted one and not in work."""
    if record.identity.fingerprint != wanted.identity.fingerprint or _mismatch(record, wanted):
        return None
    if live_holder(folder) is not None:
        log.warning("%s: the same sweep is running there: this one gets its own folder", folder)
        return None
    try:
        lock = FolderLock(folder)
    except Refused:  # taken since the line above
        return None
    return OpenSweep(folder.absolute(), lock, _study_of(record, folder, wanted), resumed=True)


def _new(wanted: Wanted) -> OpenSweep:
    _note_other_unfinished(wanted)
    folder, lock = _make_folder(wanted)
    settings, identity = wanted.settings, wanted.identity
    storage = open_storage(settings.storage, folder)
    name, study = newest_study(storage, identity.fingerprint, settings, folder, wanted.slots)
    record = {
        "schema": SWEEP_SCHEMA,
        "fingerprint": identity.fingerprint,
        "direction": settings.direction,
        "storage": shown(settings.storage),
        "study_name": name,
        "swept": list(identity.swept),
        "intervals": identity.intervals,
        "base": identity.base,
    }
    write_json(folder / SWEEP_FILE, record)
    return OpenSweep(folder, lock, study, resumed=False)


def _make_folder(wanted: Wanted) -> tuple[Path, FolderLock]:
    """A folder that this call alone made (or found empty where the user named it), and its lock."""
    folder = wanted.folder.absolute()
    if wanted.is_explicit and folder.is_dir():
        return folder, _lock_of_empty(folder, wanted)
    made = new_folder(folder.parent, folder.name)
    return made, FolderLock(made)


def _lock_of_empty(folder: Path, wanted: Wanted) -> FolderLock:
    """The lock first: another sweep may be at its start there. What one left that was killed then is nothing."""
    lock = FolderLock(folder)
    if any(not path.name.startswith((LOCK_NAME, DATABASE_NAME)) for path in folder.iterdir()):
        lock.release()
        raise Refused(f"hydra.sweep.dir={wanted.folder}: holds files, but no sweep; name a new folder or an empty one")
    return lock


def _study_of(record: SweepRecord, folder: Path, wanted: Wanted) -> SweepStudy:
    url = wanted.settings.storage or record.storage
    if url is not None and "***" in url:
        raise Refused(f"{folder}: its trials are in {url}, without the password: give sweep.storage=URL as before")
    storage = open_storage(url, folder)
    study = open_study(storage, record.study_name, wanted.settings.direction)
    return SweepStudy(study, folder, wanted.settings.seed)


def _mismatch(record: SweepRecord, wanted: Wanted) -> list[str]:
    lines = identity_differences(record.identity, wanted.identity)
    if record.direction != wanted.settings.direction:
        lines.append(f"hydra.sweeper.direction: {record.direction} there, {wanted.settings.direction} in this command")
    asked = wanted.settings.storage
    if asked is not None and shown(asked) != record.storage:
        there = record.storage or "a file in the folder"
        lines.append(f"sweep.storage: {there} there, {shown(asked)} in this command")
    return lines


def _newest_first(parent: Path) -> list[tuple[Path, SweepRecord]]:
    """The sweeps in a folder; one that is deleted meanwhile is none."""
    found: list[tuple[int, Path, SweepRecord]] = []
    for path in parent.glob(f"*/{SWEEP_FILE}"):
        try:
            found.append((path.stat().st_mtime_ns, path.parent, read_record(path.parent)))
        except (FileNotFoundError, PoimenError):
            if path.exists():
                raise
    return [(folder, record) for _, folder, record in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def _note_other_unfinished(wanted: Wanted) -> None:
    """Says which keys set this command apart from the newest other sweep beside it."""
    others = [] if wanted.is_explicit else _newest_first(wanted.folder.parent)
    if others and (lines := _mismatch(others[0][1], wanted)):
        log.info("a new sweep, not a part of %s: %s", others[0][0], "; ".join(lines[:5]))
