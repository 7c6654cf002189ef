"""One pass over a corpus: every row is validated, and only its place and a few hashes are kept."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from poimen_exp.corpus.cache import inflate
from poimen_exp.corpus.lines import LineReader, Report
from poimen_exp.corpus.manifest import Manifest, ManifestFile
from poimen_exp.corpus.rows import DocumentRow, Row, RowError, Span, TrajectoryRow, decode_row
from poimen_exp.errors import CorpusError

_GOLD_CHARS, _GOLD_WORDS, _PLAINLY_LONG = 40, 10, 400
_RECENT_BYTES = 32 * 2**20

_ROW = np.dtype(
    [
        ("file", "i4"),
        ("line", "i4"),
        ("offset", "i8"),
        ("length", "i4"),
        ("project", "i4"),
        ("id", "i8"),
        ("text", "i8"),
    ]
)
_TASK = np.dtype([*_ROW.descr, ("document", "i8")])
_GOLD = np.dtype([("text", "i8"), ("task", "i4")])
Table = npt.NDArray[Any]


@dataclass(frozen=True)
class SourceFile:
    """A corpus file that can be read by offset; ``name`` is what messages call it.

    ``stamp`` is (bytes, mtime in ns) before the scan; None for inflated text, which lies in the cache under
    its hash: another process may put it there anew, but only with the same bytes.
    """

    path: Path
    name: str
    sha256: str
    stamp: tuple[int, int] | None


@dataclass(frozen=True)
class CorpusIndex:
    """Where every row stands. Hashes are of this process only (``hash`` of Python strings).

    Attributes:
        tasks: [N] structured: file, line, offset, length, project, id, text (hash of its own chunks, 0 if none) and
            document (position in ``documents``, -1 for own chunks); in file order.
        documents: [D] the same without document, ordered by id hash.
        gold: [G] hash of a distinctive evidence text, and its task.
    """

    files: tuple[SourceFile, ...]
    projects: tuple[str, ...]
    tasks: Table
    documents: Table
    gold: Table

    def place(self, row: Any) -> tuple[str, int]:
        """(file, physical line) of a row of ``tasks`` or ``documents``."""
        return self.files[int(row["file"])].name, int(row["line"])


def scan(manifest: Manifest, report: Report) -> CorpusIndex:
    """Reads and validates every row of the manifest's files.

    Args:
        report: gets every problem; if it returns, the scan goes on without the row.
    """
    scanner = _Scanner(report)
    for entry in manifest.files:
        scanner.read_file(manifest, entry)
    return scanner.finish()


class _Scanner:
    def __init__(self, report: Report) -> None:
        self._report = report
        self._files: list[SourceFile] = []
        self._projects: dict[str, int] = {}
        self._tasks = [array(code) for code in "iiqiiqqq"]
        self._documents = [array(code) for code in "iiqiiqq"]
        self._gold_text, self._gold_task = array("q"), array("i")
        self._recent: OrderedDict[int, _Document] = OrderedDict()
        self._recent_bytes = 0
        self._pending = array("i")

    def read_file(self, manifest: Manifest, entry: ManifestFile) -> None:
        path, name = manifest.folder / entry.path, str(manifest.folder / entry.path)
        if not path.is_file():
            self._report(name, 1, f"not found, but {manifest.path.name} lists it")
            return
        packed = entry.path.endswith(".gz")
        if packed:
            sha256 = _file_sha256(path)
            plain = inflate(path, name, sha256, self._report)
            if plain is None:
                return
            path = plain
        stamp = None if packed else _stamp(path.stat())
        lines = LineReader(path, name, self._report)
        self._files.append(SourceFile(path, name, entry.sha256, stamp))
        records = sum(self._read_row(number, offset, raw) for number, offset, raw in lines)
        found = sha256 if packed else lines.sha256
        if found != entry.sha256:
            before = manifest.path.read_bytes().partition(entry.sha256.encode())[0]
            message = (
                f"SHA-256 of {name} is {found}, the manifest has {entry.sha256}; the file changed after it was "
                f'written: restore it, or write "sha256": "{found}", "records": {records} here'
            )
            self._report(str(manifest.path), before.count(b"\n") + 1, message)
        elif records != entry.records:
            self._report(name, max(lines.lines, 1), f"got {records} rows, the manifest has {entry.records}")

    def _read_row(self, number: int, offset: int, raw: bytes) -> bool:
        try:
            row = decode_row(raw)
            place = (len(self._files) - 1, number, offset, len(raw))
            if isinstance(row, DocumentRow):
                self._add_document(row, place)
            else:
                self._add_task(row, place)
        except RowError as error:
            self._report(self._files[-1].name, number, str(error))
        return True

    def _project(self, name: str) -> int:
        return self._projects.setdefault(name, len(self._projects))

    def _add_document(self, row: DocumentRow, place: tuple[int, int, int, int]) -> None:
        text = hash(tuple([unit.text for unit in row.units]))
        key = hash(row.document_id)
        _append(self._documents, (*place, self._project(row.project), key, text))
        replaced = self._recent.pop(key, None)  # an id that occurs twice
        self._recent[key] = _Document(row, place[3])
        self._recent_bytes += place[3] - (0 if replaced is None else replaced.size)
        while self._recent_bytes > _RECENT_BYTES and len(self._recent) > 1:
            self._recent_bytes -= self._recent.popitem(last=False)[1].size

    def _add_task(self, row: TrajectoryRow, place: tuple[int, int, int, int]) -> None:
        task = len(self._tasks[0])
        project = -1 if row.project is UNSET else self._project(row.project)
        document, text = 0, 0
        if row.document_id is not UNSET:
            document = hash(row.document_id)
            recent = self._recent.get(document)
            if recent is None:
                self._pending.append(task)
            else:
                project = self._against_document(row, task, recent)
        elif row.chunks is not UNSET:
            text = hash(tuple([chunk.text for chunk in row.chunks])) or 1
            for chunk in row.chunks:
                if chunk.evidence:
                    self._add_gold(chunk.text, task)
        _append(self._tasks, (*place, project, hash(row.trajectory_id), text, document))

    def _add_gold(self, text: str, task: int) -> None:
        if is_distinctive(text):
            self._gold_text.append(hash(text))
            self._gold_task.append(task)

    def _against_document(self, row: TrajectoryRow, task: int, document: _Document) -> int:
        """Project of a task, after its spans and its project were held against its document."""
        project = document.row.project
        if row.project is not UNSET and row.project != project:
            raise RowError(f"project: got {row.project!r}, but document {document.row.document_id!r} is of {project!r}")
        if row.evidence:
            for text in _span_texts(row.evidence, document):
                self._add_gold(text, task)
        return self._project(project)

    def finish(self) -> CorpusIndex:
        self._recent.clear()
        documents = _table(_ROW, self._documents)
        documents = documents[np.argsort(documents["id"], kind="stable")]
        tasks = _table(_TASK, self._tasks)
        self._report_duplicates("document_id", documents)
        self._report_duplicates("trajectory_id", tasks[np.argsort(tasks["id"], kind="stable")])
        keep = self._link(tasks, documents)
        self._check_pending(tasks, documents, keep)
        gold = np.zeros(len(self._gold_text), _GOLD)
        gold["text"], gold["task"] = self._gold_text, self._gold_task
        if not keep.all():
            gold = gold[keep[gold["task"]]]
            gold["task"] = (np.cumsum(keep) - 1)[gold["task"]]
            tasks = tasks[keep]
        return CorpusIndex(tuple(self._files), tuple(self._projects), tasks, documents, gold)

    def _report_duplicates(self, key: str, table: Table) -> None:
        twice = np.flatnonzero(table["id"][1:] == table["id"][:-1])
        for position in twice[np.lexsort((table["line"][twice + 1], table["file"][twice + 1]))]:
            first, second = table[position], table[position + 1]
            row = read_row(self._files, second)
            name = row.document_id if isinstance(row, DocumentRow) else row.trajectory_id
            where = f"{self._files[int(first['file'])].name}:{int(first['line'])}"
            self._report(
                self._files[int(second["file"])].name, int(second["line"]), f"{key} {name!r} is already at {where}"
            )

    def _link(self, tasks: Table, documents: Table) -> npt.NDArray[np.bool_]:
        """Turns the id hash in ``document`` into a position; False for tasks whose document is not there."""
        own = tasks["text"] != 0
        found = np.ones(len(tasks), bool)
        wanted = tasks["document"]
        if len(documents):
            position = np.minimum(np.searchsorted(documents["id"], wanted), len(documents) - 1)
            found = own | (documents["id"][position] == wanted)
        else:
            position = np.zeros(len(tasks), np.int64)
            found = own.copy()
        for missing in np.flatnonzero(~found):
            row = read_row(self._files, tasks[missing])
            assert isinstance(row, TrajectoryRow)
            self._report(
                self._files[int(tasks[missing]["file"])].name,
                int(tasks[missing]["line"]),
                f"document_id {row.document_id!r}: no such document in this corpus",
            )
        tasks["document"] = np.where(own, -1, position)
        return np.asarray(found, bool)

    def _check_pending(self, tasks: Table, documents: Table, keep: npt.NDArray[np.bool_]) -> None:
        """Validates tasks that stood far from their document; each document is read once more, not once a task.

        Clears ``keep`` of those that do not fit.
        """
        pending = np.array(self._pending, np.int32)
        pending = pending[keep[pending]]
        pending = pending[np.argsort(tasks["document"][pending], kind="stable")]
        at, document = -1, None
        for task in pending.tolist():
            position = int(tasks[task]["document"])
            wanted = read_row(self._files, tasks[task])
            if document is None or position != at:
                found = read_row(self._files, documents[position])
                assert isinstance(found, DocumentRow)
                at, document = position, _Document(found, 0)
            assert isinstance(wanted, TrajectoryRow)
            try:
                tasks[task]["project"] = self._against_document(wanted, task, document)
            except RowError as error:
                keep[task] = False
                self._report(self._files[int(tasks[task]["file"])].name, int(tasks[task]["line"]), str(error))


def is_distinctive(text: str) -> bool:
    """Whether evidence of this text ties projects to one side of the split: at least 40 characters and 10 different
    words. Shorter ones ("Yeah, that's right.") recur by chance.
    """
    if len(text) < _GOLD_CHARS:
        return False
    return len(text) >= _PLAINLY_LONG or len(set(text.split())) >= _GOLD_WORDS


class _Document:
    """A document that trajectories are held against; its units by id are looked up once they are asked for."""

    def __init__(self, row: DocumentRow, size: int) -> None:
        self.row, self.size = row, size

    @cached_property
    def texts(self) -> dict[str, str]:
        return {unit.unit_id: unit.text for unit in self.row.units}


def _span_texts(spans: list[Span], document: _Document) -> list[str]:
    golds: list[str] = []
    for position, span in enumerate(spans):
        text = document.texts.get(span.unit_id)
        if text is None:
            raise RowError(
                f"evidence[{position}].unit_id: got {span.unit_id!r}, document {document.row.document_id!r} "
                "has no such unit"
            )
        if span.end > len(text):
            raise RowError(
                f"evidence[{position}].end: got {span.end}, unit {span.unit_id!r} has {len(text)} characters "
                "(Unicode code points)"
            )
        gold = text[span.start : span.end]
        if gold.isspace():
            raise RowError(f"evidence[{position}]: the span holds white space only")
        golds.append(gold)
    return golds


def read_row(files: tuple[SourceFile, ...] | list[SourceFile], place: Any) -> Row:
    """The row at a place that a scan found good."""
    return decode_row(read_bytes(files, place))


def read_bytes(files: tuple[SourceFile, ...] | list[SourceFile], place: Any) -> bytes:
    """The bytes of the row at ``place``.

    Raises:
        CorpusError: the file is no longer the one that was scanned.
    """
    file = files[int(place["file"])]
    with file.path.open("rb") as stream:
        stream.seek(int(place["offset"]))
        raw = stream.read(int(place["length"]))
        after = _stamp(os.fstat(stream.fileno()))  # after the read: a write before it has moved the mtime by now
    if file.stamp not in (None, after):
        raise CorpusError(
            f"{file.name}:{int(place['line'])}: the file was replaced or written to since this process checked it; "
            "leave it as it is while it is in use, and start again"
        )
    return raw


def _stamp(stat: os.stat_result) -> tuple[int, int]:
    """Without the inode: a bucket that is mounted may give a file another one at every opening."""
    return stat.st_size, stat.st_mtime_ns


def _append(columns: list[Any], values: tuple[int, ...]) -> None:
    for column, value in zip(columns, values, strict=True):
        column.append(value)


def _table(dtype: np.dtype[Any], columns: list[Any]) -> Table:
    table = np.zeros(len(columns[0]), dtype)
    for name, column in zip(dtype.names or (), columns, strict=True):
        table[name] = column
        del column[:]
    return table


def _file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
