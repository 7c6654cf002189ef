"""What the audits need of a corpus, gathered in one pass and kept in columns."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from poimen_exp.corpus.chunking import ChunkPlan
from poimen_exp.corpus.index import CorpusIndex
from poimen_exp.corpus.labels import exit_labels
from poimen_exp.corpus.loader import TaskReader
from poimen_exp.corpus.rows import DocumentRow, Span, TrajectoryRow
from poimen_exp.errors import CorpusError
from poimen_exp.gates.types import ReadingTask

SHORT_ANSWER_WORDS = 6
Column = npt.NDArray[Any]


@dataclass(frozen=True)
class Facts:
    """Columns over chunks [C] and over trajectories [N]; labels are 1, 0 or -1 for unknown.

    Attributes:
        chunk_task: [C] which trajectory a chunk belongs to; chunks of one stand together, in order.
        position: [C] index of the chunk in its trajectory.
        evidence: [C] update label.
        exit_here: [C] exit label.
        project: [N] position of the project in ``projects``.
        n_chunks: [N].
        longest: [N] tokens of the longest chunk.
        exit_index: [N] -1 never, -2 unknown.
        spelled: [N] 1 if a short answer stands in a chunk labelled evidence-free, 0 if not, -1 if it cannot be asked.
        spans: [N] passages of evidence in documents cut here (spans of neighbouring units are one); cut: [N] those in
            more than one chunk.
        headless: [N] chunks that start below a header of their document without showing one.
    """

    projects: tuple[str, ...]
    chunk_task: Column
    position: Column
    evidence: Column
    exit_here: Column
    tokens: Column
    project: Column
    n_chunks: Column
    longest: Column
    exit_index: Column
    spelled: Column
    spans: Column
    cut: Column
    headless: Column

    def at(self, chunks: Column) -> tuple[Column, Column]:
        """([n] index, [n] relative place) of some chunks: positions in [C], or a mask of it."""
        position = self.position[chunks]
        return position, (position + 0.5) / self.n_chunks[self.chunk_task[chunks]]

    def per_task(self, mask: Column) -> Column:
        """[N] chunks of each trajectory that the mask [C] holds."""
        starts = np.cumsum(self.n_chunks, dtype=np.int64) - self.n_chunks
        return np.add.reduceat(mask, starts, dtype=np.int64)

    def of_tasks(self, chosen: Column) -> Facts:
        """The trajectories of a mask [N] and their chunks."""
        chunks = chosen[self.chunk_task]
        columns = {name: getattr(self, name)[chunks] for name in _CHUNK_COLUMNS}
        return _facts(self.projects, columns, {name: getattr(self, name)[chosen] for name in _TASK_COLUMNS})


_CHUNK_COLUMNS = {"evidence": "b", "exit_here": "b", "tokens": "i"}
_TASK_COLUMNS = ("project", "n_chunks", "longest", "exit_index", "spelled", "spans", "cut", "headless")


def gather(
    index: CorpusIndex,
    reader: TaskReader,
    positions: Iterable[int],
    judge: Callable[[ReadingTask, ChunkPlan], bool] = lambda _task, _plan: True,
    failed: Callable[[CorpusError], None] | None = None,
) -> Facts:
    """One pass over the trajectories at ``positions``.

    Args:
        judge: says whether a trajectory counts; it sees every one that can be read.
        failed: gets the error of a trajectory that cannot be cut; None raises it.
    """
    chunks = {name: array(code) for name, code in _CHUNK_COLUMNS.items()}
    tasks = {name: array("i") for name in _TASK_COLUMNS}
    fold = _Folded()
    for position in positions:
        try:
            task, plan, row = reader.read_with_row(position)
        except CorpusError as error:
            if failed is None:
                raise
            failed(error)
            continue
        if not judge(task, plan):
            continue
        count = len(task.chunks)
        chunks["evidence"].extend(_marks(task.evidence))
        chunks["exit_here"].extend(_marks(exit_labels(task.exit, count)))
        chunks["tokens"].extend(plan.counts)
        place = index.tasks[position]
        stop = -2 if not task.exit.known else -1 if task.exit.index is None else task.exit.index
        document = int(place["document"])
        spans, cut, bare = _cuts(*reader.document_plan(document), row) if document >= 0 else (0, 0, 0)
        found = (int(place["project"]), count, max(plan.counts), stop, spelled(task, fold), spans, cut, bare)
        for name, value in zip(_TASK_COLUMNS, found, strict=True):
            tasks[name].append(value)
    return _facts(index.projects, _columns(chunks), _columns(tasks))


def _columns(values: dict[str, array[int]]) -> dict[str, Column]:
    """The arrays as columns over the same memory."""
    return {
        name: np.frombuffer(one, one.typecode) if one else np.zeros(0, one.typecode) for name, one in values.items()
    }


def _facts(projects: tuple[str, ...], chunks: dict[str, Column], tasks: dict[str, Column]) -> Facts:
    """Facts whose ``chunk_task`` and ``position`` follow from how many chunks each trajectory has."""
    lengths = tasks["n_chunks"]
    task = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths).astype(np.int32)
    position = np.arange(len(task), dtype=np.int32)
    position -= starts[task]
    return Facts(projects, chunk_task=task, position=position, **chunks, **tasks)


def _marks(labels: Iterable[bool | None]) -> list[int]:
    return [-1 if label is None else int(label) for label in labels]


class _Folded:
    """Case-folded chunks, kept for the next trajectory over the same ones."""

    def __init__(self) -> None:
        self._of: tuple[str, ...] = ()
        self._folded: tuple[str, ...] = ()

    def __call__(self, chunks: tuple[str, ...]) -> tuple[str, ...]:
        if chunks is not self._of:
            self._of, self._folded = chunks, tuple(chunk.casefold() for chunk in chunks)
        return self._folded


def spelled(task: ReadingTask, fold: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None) -> int:
    """1 if an answer of at most 6 words (no yes or no) stands in a chunk labelled evidence-free, as whole words.

    0 if none does, -1 if it cannot be asked. ``fold`` gives the case-folded chunks.
    """
    short = [
        answer.casefold().strip()
        for answer in task.answers or ()
        if 0 < len(answer.split()) <= SHORT_ANSWER_WORDS and answer.casefold().strip() not in ("yes", "no")
    ]
    if not short or not any(label for label in task.evidence):
        return -1
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(answer)}(?!\w)" for answer in short))
    folded = (fold or _Folded())(task.chunks)
    free = (chunk for chunk, label in zip(folded, task.evidence, strict=True) if label is False)
    # A plain search first: the pattern has no fixed start, and takes twenty times as long.
    return int(any(any(answer in chunk for answer in short) and pattern.search(chunk) for chunk in free))


def _cuts(document: DocumentRow, plan: ChunkPlan, row: TrajectoryRow) -> tuple[int, int, int]:
    """(passages, passages in more than one chunk, chunks without their header) of a trajectory over a document."""
    spans = row.evidence if isinstance(row.evidence, list) else []
    found = _passages(document, spans)
    cut = sum(len({chunk for at in passage for chunk in _chunks_of(plan, *at)}) > 1 for passage in found)
    return len(found), cut, headless(document, plan)


def _passages(document: DocumentRow, spans: Sequence[Span]) -> list[list[tuple[int, int, int]]]:
    """Spans as (unit position, start, end), those in the same or in neighbouring units taken together."""
    asked = {span.unit_id for span in spans}
    number = {unit.unit_id: position for position, unit in enumerate(document.units) if unit.unit_id in asked}
    passages: list[list[tuple[int, int, int]]] = []
    for at in sorted((number[span.unit_id], span.start, span.end) for span in spans):
        if passages and at[0] - passages[-1][-1][0] <= 1:
            passages[-1].append(at)
        else:
            passages.append([at])
    return passages


def _chunks_of(plan: ChunkPlan, unit: int, start: int, end: int) -> set[int]:
    return {
        chunk
        for chunk, pieces in enumerate(plan.chunks)
        if pieces[0][0] <= unit <= pieces[-1][0]
        for where, first, last in pieces
        if where == unit and start < last and first < end
    }


def headless(document: DocumentRow, plan: ChunkPlan) -> int:
    """Chunks that start with a unit without header, in a document where an earlier unit had one."""
    first = next((number for number, unit in enumerate(document.units) if unit.heading is not None), None)
    if first is None:
        return 0
    starts = (pieces[0][0] for pieces in plan.chunks)
    return sum(unit > first and document.units[unit].heading is None for unit in starts)
