"""One line of a corpus file: what it may hold, and what is wrong with one that does not."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

MAX_LINE_BYTES = 64 * 2**20
"""Longest line that is read: one document of about 16 million tokens. It bounds the memory of a scan."""


class Unit(Struct, frozen=True, gc=False):
    """A piece of a document that chunks keep whole where it fits: a turn, a paragraph, a log entry."""

    unit_id: str
    text: str
    header: str | UnsetType | None = UNSET

    @property
    def heading(self) -> str | None:
        """The line that stands above this unit in a chunk, or None."""
        return self.header or None


class DocumentRow(Struct, frozen=True, tag_field="type", tag="document"):
    """A history that several trajectories may ask about."""

    document_id: str
    project: str
    units: list[Unit]


class Span(Struct, frozen=True, gc=False):
    """Evidence: characters ``[start, end)`` of a unit's text, counted in Unicode code points."""

    unit_id: str
    start: int
    end: int


class LabelledChunk(Struct, frozen=True, gc=False):
    """A chunk as a chunk-by-chunk labeler exports it; ``evidence`` None where it was not labelled."""

    text: str
    evidence: bool | None


class TrajectoryRow(Struct, frozen=True, tag_field="type", tag="trajectory"):
    """A question over a document (first form) or over chunks of its own (second form)."""

    trajectory_id: str
    question: str
    answers: list[str] | None
    document_id: str | UnsetType = UNSET
    project: str | UnsetType = UNSET
    evidence: list[Span] | UnsetType | None = UNSET
    chunks: list[LabelledChunk] | UnsetType = UNSET
    exit_index: int | UnsetType | None = UNSET

    @property
    def stop(self) -> int | None:
        """``exit_index`` where the row gives one."""
        return None if self.exit_index is UNSET else self.exit_index


Row = DocumentRow | TrajectoryRow

_DECODER: msgspec.json.Decoder[Row] = msgspec.json.Decoder(Row)
_ID = re.compile(r"[^\x00-\x1f\x7f]+")
_KEY_LIST = (
    "type document_id project units unit_id text header "
    "trajectory_id question answers evidence chunks exit_index start end"
)
_KEYS = frozenset(_KEY_LIST.split())
_TAGGED_KEYS = {key: f'"{key}"'.encode() for key in sorted(_KEYS)}
_SPACE_BEFORE_COLON = re.compile(rb'"[ \t\r]+:')
_LONG_LINE = 4096
"""Bytes from which numpy finds colons sooner than ``bytes.count`` and a pattern do."""
_ASCII_ESCAPES = (b"\\u005", b"\\u006", b"\\u007")


class RowError(ValueError):
    """A line that is not a row; the message says why, without the place."""


def decode_row(line: bytes) -> Row:
    """The row of one physical line.

    Unknown keys are ignored. A key of the format that occurs twice is refused: readers in other languages would not
    agree which of the two counts.

    Raises:
        RowError: not JSON, not an object, a missing or mistyped field, a contradiction inside the row.
    """
    if len(line) > MAX_LINE_BYTES:
        raise RowError(f"the line has {len(line):,} bytes, the longest one read has {MAX_LINE_BYTES:,}")
    try:
        row = _DECODER.decode(line)
    except msgspec.ValidationError as error:
        raise RowError(f"{error}{_hint(str(error))}") from None
    except msgspec.DecodeError as error:
        raise RowError(_not_json(line, error)) from None
    except RecursionError:
        raise RowError("not read: nested too deeply") from None
    keys, spaced = _colons(line)
    if keys != _key_count(row) or spaced:
        _refuse_duplicate_keys(line, row)
    problem = _document_problem(row) if isinstance(row, DocumentRow) else _trajectory_problem(row)
    if problem is not None:
        raise RowError(problem)
    return row


def _hint(message: str) -> str:
    if "got `int`" in message and message.rstrip("`").endswith("_id"):
        return ' (ids are strings: write 1 as "1")'
    if "missing required field `evidence`" in message or "missing required field `answers`" in message:
        return " (write null where there is none)"
    if message.endswith("at `$.type`"):
        return " (expected document or trajectory)"
    return ""


def _not_json(line: bytes, error: msgspec.DecodeError) -> str:
    if line[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "the file is UTF-16, expected UTF-8: convert it"
    return f"not one JSON object in UTF-8: {error}"


def _colons(line: bytes) -> tuple[int, bool]:
    """How many colons stand right after a quote, and whether one stands after a quote and white space."""
    if len(line) < _LONG_LINE:
        return line.count(b'":'), _SPACE_BEFORE_COLON.search(line) is not None
    text = np.frombuffer(line, np.uint8)
    before, colon = text[:-1], text[1:] == ord(":")
    spaced = bool(np.any(colon & (before <= ord(" ")))) and _SPACE_BEFORE_COLON.search(line) is not None
    return int(np.count_nonzero(colon & (before == ord('"')))), spaced


def _key_count(row: Row) -> int:
    """Keys of the format that ``row`` came with; a line with more ``":`` has other keys, quotes or duplicates."""
    if isinstance(row, DocumentRow):
        return 4 + 3 * len(row.units) - [unit.header for unit in row.units].count(UNSET)
    optional = (row.document_id, row.project, row.evidence, row.chunks, row.exit_index)
    count = 4 + sum(value is not UNSET for value in optional)
    if isinstance(row.evidence, list):
        count += 3 * len(row.evidence)
    return count + (0 if row.chunks is UNSET else 2 * len(row.chunks))


def _refuse_duplicate_keys(line: bytes, row: Row) -> None:
    """Second look at a line whose count of keys is not plain; decodes it again only where that cannot be told."""
    expected = _expected_keys(row)
    escaped = any(escape in line for escape in _ASCII_ESCAPES)
    if not escaped and all(line.count(tagged) == expected.get(key, 0) for key, tagged in _TAGGED_KEYS.items()):
        return
    try:
        json.loads(line, object_pairs_hook=_unique, parse_int=str, parse_float=str)
    except RecursionError:
        raise RowError("not read: nested too deeply") from None
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RowError(f"not one JSON object in UTF-8: {error.msg}") from None


def _expected_keys(row: Row) -> dict[str, int]:
    if isinstance(row, DocumentRow):
        headers = sum(unit.header is not UNSET for unit in row.units)
        units = len(row.units)
        return {"type": 1, "document_id": 1, "project": 1, "units": 1} | {
            "unit_id": units, "text": units, "header": headers,
        }  # fmt: skip
    spans = len(row.evidence) if isinstance(row.evidence, list) else 0
    chunks = 0 if row.chunks is UNSET else len(row.chunks)
    counts = {"type": 1, "trajectory_id": 1, "question": 1, "answers": 1}
    for key in ("document_id", "project", "chunks", "exit_index"):
        counts[key] = int(getattr(row, key) is not UNSET)
    evidence = int(row.evidence is not UNSET) + chunks
    return counts | {"unit_id": spans, "start": spans, "end": spans, "evidence": evidence, "text": chunks}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [key for key, _ in pairs]
        twice = sorted({key for key in names if key in _KEYS and names.count(key) > 1})
        if twice:
            raise RowError(f"key {twice[0]!r} occurs twice in one object; keep one")
    return seen


def _bad_id(key: str, value: str) -> str | None:
    if _ID.fullmatch(value):
        return None
    return f"{key}: got {value!r}, expected a string that is not empty and has no control characters"


def _document_problem(row: DocumentRow) -> str | None:
    problem = _bad_id("document_id", row.document_id) or _bad_id("project", row.project)
    if problem is not None:
        return problem
    if len({unit.unit_id for unit in row.units}) != len(row.units):
        ids = [unit.unit_id for unit in row.units]
        twice = next(unit_id for position, unit_id in enumerate(ids) if unit_id in ids[:position])
        return f"units: unit_id {twice!r} occurs twice; every unit of a document needs its own"
    if not any(unit.text and not unit.text.isspace() for unit in row.units):
        return f"document {row.document_id!r} has no text"
    return None


def _trajectory_problem(row: TrajectoryRow) -> str | None:
    problem = _bad_id("trajectory_id", row.trajectory_id)
    if problem is None and row.project is not UNSET:
        problem = _bad_id("project", row.project)
    if problem is None and row.answers == []:
        problem = "answers: got an empty list, expected null (the corpus has none) or at least one answer"
    if problem is None and not row.question.strip():
        problem = "question: got no text"
    if problem is not None:
        return problem
    return _own_chunks_problem(row) if row.document_id is UNSET else _form_one_problem(row)


def _form_one_problem(row: TrajectoryRow) -> str | None:
    if row.chunks is not UNSET:
        return "both document_id and chunks are given; a trajectory has one of them"
    if row.evidence is UNSET:
        return "evidence is missing; write null for not labelled, [] for labelled without evidence"
    for position, span in enumerate(row.evidence or ()):
        if not 0 <= span.start < span.end:
            return f"evidence[{position}]: got start {span.start}, end {span.end}, expected 0 <= start < end"
    return None


def _own_chunks_problem(row: TrajectoryRow) -> str | None:
    if row.chunks is UNSET:
        return "neither document_id nor chunks is given; a trajectory has one of them"
    if row.project is UNSET:
        return "project is missing; a trajectory with its own chunks names the project it is split by"
    if row.evidence is not UNSET:
        return "evidence is given beside chunks; there it belongs into each chunk"
    if not row.chunks:
        return "chunks: got an empty list, expected at least one chunk"
    for position, chunk in enumerate(row.chunks):
        if not chunk.text or chunk.text.isspace():
            return f"chunks[{position}].text: got no text"
    last = len(row.chunks) - 1
    stop = row.stop
    if stop is not None and not 0 <= stop <= last:
        return f"exit_index: got {stop}, expected 0 to {last}"
    if stop is not None:
        late = [index for index, chunk in enumerate(row.chunks) if chunk.evidence and index > stop]
        if late:
            return f"exit_index: got {stop}, but chunk {late[-1]} still holds evidence; stop there or later"
    return None
