"""Files and folders that appear whole or not at all, readable by other users' servers."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE_MODE = 0o644
READ_ONLY = 0o444
FOLDER_MODE = 0o755


def write_text_atomically(path: Path, text: str) -> None:
    """Writes aside and renames: a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.chmod(FILE_MODE)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def folder_written_aside(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yields an empty folder beside ``target``; when the block ends it is synced to disk and takes target's place.

    An earlier target is kept until the new folder is complete, then renamed away and removed; without ``replace`` it
    stays and the new folder is dropped. A crash leaves at most a folder whose name starts with a dot, which nothing
    reads.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    aside.mkdir()
    try:
        yield aside
        sync_folder(aside)
        if replace:
            _replace_folder(aside, target)
        else:
            _place_folder(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync_folder(folder: Path, file_mode: int = FILE_MODE) -> None:
    """Makes a flat folder world-readable (safetensors writes 0600, a server of another user could not mount it) and
    durable."""
    for path in folder.iterdir():
        path.chmod(file_mode)
        _fsync(path)
    folder.chmod(FOLDER_MODE)
    _fsync(folder)


def _replace_folder(source: Path, target: Path) -> None:
    if target.exists():
        old = target.with_name(f".{target.name}.{uuid.uuid4().hex}.old")
        target.rename(old)
        source.rename(target)
        shutil.rmtree(old)
    else:
        source.rename(target)
    _fsync(target.parent)


def _place_folder(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
