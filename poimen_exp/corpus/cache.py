"""What is computed once for a corpus and a tokenizer, kept on disk between runs."""

from __future__ import annotations

import gzip
import hashlib
import os
import sqlite3
import threading
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

    Returns None, after a report, if the file is damaged.
    """
    target = cache_folder("inflated") / f"{sha256}.jsonl"
    if target.exists():
        return target
    partial = target.with_suffix(f".{os.getpid()}.partial")
    lines = 0
    try:
        with gzip.open(path, "rb") as source, partial.open("wb") as sink:
            while block := source.read(2**20):
                lines += block.count(b"\n")
                sink.write(block)
        partial.replace(target)
    except (OSError, EOFError, zlib.error) as error:
        report(name, lines + 1, f"the gzip stream is damaged: {error}")
        return None
    finally:
        partial.unlink(missing_ok=True)
    return target
