"""One writer a folder: a lock that the kernel drops when its process dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import threading
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from poimen_exp.errors import Refused

LOCK_NAME = ".lock"
_FLOCK = "hhqqi4x"
"""Linux's ``struct flock``: type, whence, start, length, process."""


@dataclass(frozen=True)
class Holder:
    """Who wrote a lock file. ``started`` is when the lock was taken, ISO 8601 in UTC."""

    pid: int
    started: str
    host: str
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started} ({self.command})"


_UNKNOWN = Holder(0, "an unknown time", "an unknown host", "its lock file cannot be read")
_held: dict[Path, Holder] = {}
"""Locks of this process: record locks do not exclude one another within a process."""
_guard = threading.Lock()


class FolderLock:
    """An exclusive lock on a folder, held until ``release`` or the end of the process.

    The truth is a POSIX record lock on ``.lock``, not the file: a lock file left behind by ``kill -9`` is stale and
    is taken over. Forked children do not inherit it.

    Attributes:
        stale: the holder that died without releasing, if the lock was taken over from one.

    Raises:
        Refused: another process, or this one, holds the folder; the message says who and since when.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        me = Holder(
            os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"), socket.gethostname(), " ".join(sys.argv)[:500]
        )
        with _guard:
            if self._folder in _held:
                raise Refused(_busy(folder, _held[self._folder]))
            self._descriptor = _lock_file(folder, self._folder / LOCK_NAME)
            _held[self._folder] = me
        self._pid = me.pid
        left = os.read(self._descriptor, 4096)
        self.stale = _parse(left) if left else None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(asdict(me)).encode(), 0)

    def release(self) -> None:
        """Frees the folder and removes the lock file; does nothing the second time, and in a forked child."""
        with _guard:
            if self._descriptor < 0 or os.getpid() != self._pid:
                return
            # Unlinked while held: whoever opened this file meanwhile finds another inode at the path and tries again.
            (self._folder / LOCK_NAME).unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1
            del _held[self._folder]


def live_holder(folder: Path) -> Holder | None:
    """Who holds ``folder`` now; None where nobody does, also where a stale lock file lies."""
    key = folder.resolve()
    with _guard:
        # Closing a second descriptor of the file would drop this process's own lock: it is not opened here.
        if key in _held:
            return _held[key]
        try:
            descriptor = os.open(key / LOCK_NAME, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return _parse(os.read(descriptor, 4096)) if _is_locked(descriptor) else None
        finally:
            os.close(descriptor)


def _lock_file(folder: Path, path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _parse(os.read(descriptor, 4096))
            os.close(descriptor)
            raise Refused(_busy(folder, holder)) from None
        except OSError as error:
            os.close(descriptor)
            raise Refused(f"{folder}: this file system has no locks ({error}); put the run on one that has") from error
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Asked, not tried: who takes the lock to find out keeps the others out meanwhile."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind: int = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _parse(data: bytes) -> Holder:
    try:
        fields = json.loads(data)
        return Holder(int(fields["pid"]), str(fields["started"]), str(fields["host"]), str(fields["command"]))
    except (ValueError, KeyError, TypeError):
        return _UNKNOWN


def _busy(folder: Path, holder: Holder) -> str:
    return f"{folder}: held by {holder}; wait for it to end, or choose another folder"
