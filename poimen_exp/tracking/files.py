"""Files that are either whole or absent."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

from poimen_exp.errors import RunFailed


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data``; after a crash at any moment it holds the old bytes or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Makes renames inside ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Writes indented JSON atomically. NaN and infinity are refused: JSON has neither."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise RunFailed(f"{path}: a number that JSON cannot hold (NaN or infinity); nothing was written") from error
    write_atomic(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        RunFailed: missing, or not JSON; the message has file and line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunFailed(f"{path}: missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunFailed(f"{path}: damaged: not JSON ({error})") from error


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prefix_sha256(path: Path, length: int) -> str:
    """Hex SHA-256 of the first ``length`` bytes of a file."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(length)).hexdigest()


def free_name(folder: Path, name: str) -> Path:
    """A path in ``folder`` that does not exist: ``name`` itself, or with ``-2``, ``-3``, ... before its suffix."""
    path = folder / name
    number = 2
    while path.exists():
        path = folder / f"{Path(name).stem}-{number}{Path(name).suffix}"
        number += 1
    return path


def new_folder(folder: Path, name: str) -> Path:
    """A folder that this call made in ``folder``: ``name``, or with ``-2``, ``-3``, ... where others were first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            path = free_name(folder, name)
