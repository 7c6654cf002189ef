"""Reads an offline W&B file back: blocks of 32 KiB, framed records, protobuf inside."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
FULL, FIRST, LAST = 1, 2, 4
WAIT_S = 60


def wandb_files(run: Path) -> list[Path]:
    return sorted(run.glob("wandb/offline-run-*/*.wandb"))


def records(path: Path) -> list[Any]:
    """Those of a run that has finished. W&B's own process may still be writing: the last one, ``exit``, is awaited."""
    from wandb.proto import wandb_internal_pb2

    deadline = time.monotonic() + WAIT_S
    while True:
        found = [wandb_internal_pb2.Record.FromString(body) for body in _bodies(path.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        assert time.monotonic() < deadline, f"{path}: no exit record within {WAIT_S} s"
        time.sleep(0.1)


def history(path: Path) -> list[dict[str, Any]]:
    rows = (record.history.item for record in records(path) if record.WhichOneof("record_type") == "history")
    return [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in rows]


def only(path: Path, kind: str) -> Any:
    """The one record of that kind."""
    found = [record for record in records(path) if record.WhichOneof("record_type") == kind]
    assert len(found) == 1, f"{len(found)} records of kind {kind}"
    return getattr(found[0], kind)


def config(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind in ("run", "config"):
            source = record.run.config if kind == "run" else record.config
            values |= {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in source.update}
    return values


def _bodies(data: bytes) -> Iterator[bytes]:
    """Every whole one; what is cut at the end is still being written."""
    if len(data) < HEADER:
        return
    mark, magic, _ = struct.unpack("<4sHB", data[:HEADER])
    assert (mark, magic) == (b":W&B", 0xBEE1)
    position, body = HEADER, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        if kind == 0:
            position += left
            continue
        part = data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if position > len(data):
            return
        body = part if kind in (FULL, FIRST) else body + part
        if kind in (FULL, LAST):
            yield body
