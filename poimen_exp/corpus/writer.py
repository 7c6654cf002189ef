"""Writes a corpus folder: the rows, and the manifest that pins them."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from poimen_exp.corpus.manifest import SCHEMA
from poimen_exp.corpus.rows import RowError, decode_row
from poimen_exp.errors import Refused

CONSTRUCTED: Mapping[str, Any] = {"update": {"origin": "constructed"}, "exit": {"origin": "constructed"}}
"""Labels that are true by construction: generated data, or gold spans of a public set."""


def write_corpus(
    folder: Path,
    records: Iterable[Mapping[str, Any]],
    *,
    corpus_id: str,
    labels: Mapping[str, Any] = CONSTRUCTED,
    licenses: Iterable[str] = (),
    dropped: Mapping[str, int] | None = None,
    file: str = "corpus.jsonl",
    overwrite: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Streams ``records`` into ``folder/file`` and writes ``folder/manifest.json``; gives the manifest's path.

    Every record is validated as the loader would. The same records give the same bytes. ``dropped`` is read after
    the last record, so that a generator may count into it. ``extra`` adds keys to the manifest (source, seed).

    Raises:
        Refused: the folder holds a corpus already and ``overwrite`` is False; a record is not valid; no record.
    """
    folder = Path(folder)
    manifest = folder / "manifest.json"
    if manifest.exists() and not overwrite:
        raise Refused(
            f"{manifest}: there is a corpus already; choose another folder, or replace it on purpose (--overwrite)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / file
    partial = target.with_name(f".{file}.{uuid.uuid4().hex}.partial")
    try:
        sha256, count = _write_rows(partial, records, str(target))
        if not count:
            left_out = "".join(f"; dropped: {reason}: {number}" for reason, number in (dropped or {}).items())
            raise Refused(f"{target}: no row to write: the input has none{left_out}")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    value = {
        "schema": SCHEMA,
        "corpus_id": corpus_id,
        "files": [{"path": file, "sha256": sha256, "records": count}],
        "labels": labels,
        "licenses": list(licenses),
        "dropped": dict(sorted((dropped or {}).items())),
    }
    write_manifest(manifest, value | dict(extra or {}))
    return manifest


def write_manifest(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a manifest atomically."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _write_rows(path: Path, records: Iterable[Mapping[str, Any]], name: str) -> tuple[str, int]:
    digest, count = hashlib.sha256(), 0
    with path.open("wb") as stream:
        for count, record in enumerate(records, start=1):
            try:
                line = msgspec.json.encode(record)
                decode_row(line)
            except (RowError, TypeError, UnicodeEncodeError, msgspec.MsgspecError) as error:
                raise Refused(f"{name}:{count}: record cannot be written: {error}") from None
            digest.update(line + b"\n")
            stream.write(line + b"\n")
    return digest.hexdigest(), count
