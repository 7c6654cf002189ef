"""A person's own JSON lines, by a map from the fields of the format to paths in their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from poimen_exp.corpus.convert import Conversion, Record, read_json_lines
from poimen_exp.errors import CorpusError, Refused

FIELDS = {
    "trajectory_id": "id of the row (required)",
    "project": "key of the split (required)",
    "question": "the question (required)",
    "answers": "an answer, a list of them, or null; left out: no row has one",
    "chunks": "list of chunks, in order (this or units)",
    "chunk_text": "text inside a chunk; a chunk that is a string needs none",
    "chunk_evidence": "true, false or null inside a chunk (with chunks)",
    "exit_index": "index of the chunk to stop at, or null",
    "units": "list of pieces of a document that is cut at load time (this or chunks)",
    "unit_text": "text inside a unit; a unit that is a string needs none",
    "unit_header": "header inside a unit",
    "unit_evidence": "true or false inside a unit: the whole unit is evidence (with units)",
}
_ABSENT = object()


def parse_map(entries: list[str]) -> dict[str, str]:
    """``field=path`` entries as a mapping; a path walks objects by key and lists by number: ``meta.labels.0``.

    Raises:
        Refused: an unknown field, a missing one, or both ``chunks`` and ``units``.
    """
    mapping: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if name not in FIELDS or not equals or not path:
            raise Refused(f"--map {entry}: expected field=path with a field out of: {', '.join(FIELDS)}")
        mapping[name] = path
    missing = [name for name in ("trajectory_id", "project", "question") if name not in mapping]
    if missing or ("chunks" in mapping) == ("units" in mapping):
        raise Refused(
            f"--map: got {', '.join(mapping) or 'nothing'}; needed are trajectory_id, project, question, and one of "
            "chunks or units"
        )
    return mapping


def convert(path: Path, mapping: Mapping[str, str]) -> Conversion:
    """One trajectory a row. Numbers as ids become strings. Without ``chunk_evidence`` or ``unit_evidence`` nothing
    is labelled.
    """
    return Conversion(path.stem, _records(path, mapping), (), extra={"source": path.name})


def _records(path: Path, mapping: Mapping[str, str]) -> Iterator[Record]:
    for where, row in read_json_lines(path):
        head = {name: _text(where, row, name, mapping[name]) for name in ("trajectory_id", "project", "question")}
        base = {"type": "trajectory", **head, "answers": _answers(where, row, mapping)}
        stop = _at(row, mapping["exit_index"]) if "exit_index" in mapping else None
        if stop is _ABSENT:
            raise CorpusError(
                f"{where}: exit_index: got nothing at {mapping['exit_index']!r}, expected an index or null"
            )
        if stop is not None:
            base["exit_index"] = stop
        if "chunks" in mapping:
            yield base | {"chunks": [_chunk(where, item, mapping) for item in _list(where, row, "chunks", mapping)]}
        else:
            units = [_unit(where, n, item, mapping) for n, item in enumerate(_list(where, row, "units", mapping))]
            yield {"type": "document", "document_id": head["trajectory_id"], "project": head["project"], "units": units}
            evidence = _evidence(where, row, units, mapping) if "unit_evidence" in mapping else None
            yield base | {"document_id": head["trajectory_id"], "evidence": evidence}


def _at(value: Any, path: str) -> Any:
    """What stands at a dotted path, or ``_ABSENT``."""
    for key in path.split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return _ABSENT
    return value


def _text(where: str, row: Any, name: str, path: str) -> str:
    value = _at(row, path)
    if isinstance(value, bool) or not isinstance(value, str | int):
        shown = "nothing" if value is _ABSENT else repr(value)[:80]
        raise CorpusError(f"{where}: {name}: got {shown} at {path!r}, expected text")
    return str(value)


def _list(where: str, row: Any, name: str, mapping: Mapping[str, str]) -> list[Any]:
    value = _at(row, mapping[name])
    if not isinstance(value, list):
        shown = "nothing" if value is _ABSENT else repr(value)[:80]
        raise CorpusError(f"{where}: {name}: got {shown} at {mapping[name]!r}, expected a list")
    return value


def _answers(where: str, row: Any, mapping: Mapping[str, str]) -> list[str] | None:
    value = _at(row, mapping["answers"]) if "answers" in mapping else None
    if value is _ABSENT:
        raise CorpusError(
            f"{where}: answers: got nothing at {mapping['answers']!r}, expected an answer, a list or null"
        )
    if value is None or value == []:
        return None
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _label(where: str, item: Any, name: str, mapping: Mapping[str, str]) -> bool | None:
    if name not in mapping:
        return None
    value = _at(item, mapping[name])
    if value is None or isinstance(value, bool):
        return value
    shown = "nothing" if value is _ABSENT else repr(value)[:80]
    raise CorpusError(f"{where}: {name}: got {shown} at {mapping[name]!r}, expected true, false or null")


def _body(where: str, item: Any, name: str, mapping: Mapping[str, str]) -> str:
    if isinstance(item, str):
        return item
    if name not in mapping:
        raise CorpusError(f"{where}: got an object, expected a string; say where its text is with --map {name}=...")
    return _text(where, item, name, mapping[name])


def _chunk(where: str, item: Any, mapping: Mapping[str, str]) -> dict[str, Any]:
    text = _body(where, item, "chunk_text", mapping)
    return {"text": text, "evidence": _label(where, item, "chunk_evidence", mapping)}


def _unit(where: str, number: int, item: Any, mapping: Mapping[str, str]) -> dict[str, Any]:
    unit = {"unit_id": f"u{number}", "text": _body(where, item, "unit_text", mapping)}
    header = _at(item, mapping["unit_header"]) if "unit_header" in mapping else None
    return unit if header is None or header is _ABSENT else unit | {"header": str(header)}


def _evidence(
    where: str, row: Any, units: list[dict[str, Any]], mapping: Mapping[str, str]
) -> list[dict[str, Any]] | None:
    """Spans of the units labelled true; None if any is not labelled."""
    labels = [_label(where, item, "unit_evidence", mapping) for item in _list(where, row, "units", mapping)]
    if any(label is None for label in labels):
        return None
    return [
        {"unit_id": unit["unit_id"], "start": 0, "end": len(unit["text"])}
        for unit, label in zip(units, labels, strict=True)
        if label and unit["text"].strip()
    ]
