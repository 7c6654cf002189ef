"""What is computed once for a corpus and a tokenizer, kept on disk between runs."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sqlite3
import threading
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from poimen_exp.corpus.chunking import CHUNKING_VERSION, ChunkPlan
from poimen_exp.corpus.lines import Report
from poimen_exp.errors import Refused

OWN_CHUNKS = 0
"""Stands for ``chunk_tokens`` in the key of trajectories that bring their own chunks: only counts are kept."""


def cache_folder(name: str) -> Path:
    """``$POIMEN_CACHE/name``, else ``$XDG_CACHE_HOME/poimen_exp/name``, else ``~/.cache/poimen_exp/name``; made if
    absent.

    Raises:
        Refused: the folder cannot be made.
    """
    root = os.environ.get("POIMEN_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "poimen_exp"
    folder = base / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"cache folder {folder}: {error.strerror}; set POIMEN_CACHE to a folder you can write") from None
    return folder


_BATCH = 256


class PlanCache:
    """Chunk plans by the SHA-256 of the row they belong to; one SQLite file a tokenizer, shared by all corpora.

    Several processes may use it at once: it is written in short transactions.
    """

    def __init__(self, tokenizer: str) -> None:
        self.path = cache_folder("chunks") / f"v{CHUNKING_VERSION}-{tokenizer}.sqlite"
        self._lock = threading.Lock()
        self._pending: dict[tuple[bytes, int], bytes] = {}
        try:
            self._db = sqlite3.connect(self.path, timeout=60, check_same_thread=False)
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS plans (row BLOB, chunk_tokens INTEGER, plan BLOB, "
                "PRIMARY KEY (row, chunk_tokens)) WITHOUT ROWID"
            )
            self._db.commit()
        except sqlite3.Error as error:
            raise self._refusal(error) from None

    def get(self, row: bytes, chunk_tokens: int, compute: Callable[[], ChunkPlan]) -> ChunkPlan:
        """The plan of a row's bytes, computed only if it is not kept yet."""
        key = (hashlib.sha256(row).digest(), chunk_tokens)
        with self._lock:
            packed = self._pending.get(key) or self._select(key)
        if packed is not None:
            return msgspec.msgpack.decode(packed, type=ChunkPlan)
        plan = compute()
        with self._lock:
            self._pending[key] = msgspec.msgpack.encode(plan)
            full = len(self._pending) >= _BATCH
        if full:
            self.flush()
        return plan

    def _select(self, key: tuple[bytes, int]) -> bytes | None:
        try:
            found = self._db.execute("SELECT plan FROM plans WHERE row = ? AND chunk_tokens = ?", key).fetchone()
        except sqlite3.Error as error:
            raise self._refusal(error) from None
        return None if found is None else bytes(found[0])

    def _refusal(self, error: sqlite3.Error) -> Refused:
        return Refused(f"chunk cache {self.path}: {error}; delete the file, or set POIMEN_CACHE")

    def flush(self) -> None:
        """Writes out what was computed since the last flush, in one transaction: nobody waits on a computation."""
        with self._lock:
            rows = [(*key, packed) for key, packed in self._pending.items()]
            self._pending.clear()
            try:
                with self._db:
                    self._db.executemany("INSERT OR REPLACE INTO plans VALUES (?, ?, ?)", rows)
            except sqlite3.Error as error:
                raise self._refusal(error) from None

    def close(self) -> None:
        """Flushes and closes the file."""
        self.flush()
        self._db.close()


def inflate(path: Path, name: str, sha256: str, report: Report) -> Path | None:
    """The plain text of a ``.jsonl.gz``, kept in the cache so that rows can be read by offset.

    Returns None, after a report, if the file is damaged or its bytes are no longer those of ``sha256``.
    """
    target = cache_folder("inflated") / f"{sha256}.jsonl"
    if target.exists():
        return target
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        found = _inflate_into(partial, path, name, report)
        if found is None:
            return None
        if found != sha256:
            report(name, 1, f"the file changed while it was read: SHA-256 was {sha256}, then {found}; start again")
            return None
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _inflate_into(partial: Path, path: Path, name: str, report: Report) -> str | None:
    """SHA-256 of the compressed bytes that the text in ``partial`` is of; None, after a report, if they are damaged."""
    lines = 0
    try:
        with _HashingReader(path) as packed, gzip.open(packed, "rb") as source, partial.open("wb") as sink:
            while block := source.read(2**20):
                lines += block.count(b"\n")
                sink.write(block)
            return packed.sha256_to_end()
    except (OSError, EOFError, zlib.error) as error:
        report(name, lines + 1, f"the gzip stream is damaged: {error}")
        return None


class _HashingReader(io.BufferedReader):
    """A file that hashes what ``read`` gives."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self._digest = hashlib.sha256()

    def read(self, size: int | None = -1, /) -> bytes:
        block = super().read(size)
        self._digest.update(block)
        return block

    def sha256_to_end(self) -> str:
        """SHA-256 of the whole file; reads what is left of it."""
        while self.read(2**20):
            pass
        return self._digest.hexdigest()
