"""From a corpus folder to reading tasks, one side of the split at a time."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from poimen_exp.corpus.cache import OWN_CHUNKS, PlanCache
from poimen_exp.corpus.chunking import (
    ChunkingError,
    ChunkPlan,
    TokenCounter,
    UnitCounts,
    chunk_text,
    plan_chunks,
    tokenizer_sha256,
)
from poimen_exp.corpus.contract import Chunking
from poimen_exp.corpus.index import CorpusIndex, read_bytes, scan
from poimen_exp.corpus.labels import Labels, exit_labels, exit_target, labels_sha256, span_labels
from poimen_exp.corpus.lines import refuse
from poimen_exp.corpus.manifest import LabelStatus, Manifest, load_manifest
from poimen_exp.corpus.overlap import check_overlap
from poimen_exp.corpus.rows import DocumentRow, RowError, TrajectoryRow, decode_row
from poimen_exp.corpus.split import SIDES, ProjectSplit, Side, split_projects
from poimen_exp.errors import CorpusError, Refused
from poimen_exp.gates.types import ReadingTask

if TYPE_CHECKING:
    from poimen_exp.gates.codec import TextCodec
    from poimen_exp.solo.settings import CorpusSettings

PromptTokens = Callable[[str, str], int]
"""(question, chunk) -> tokens of the turn's prompt with a full memory; grows with the chunk's token count."""
_RECENT_DOCUMENTS = 16
_RECENT_BYTES = 32 * 2**20
"""Bytes of the rows of recent documents; the last one stays whatever its size."""


def open_corpus(
    settings: CorpusSettings, codec: TextCodec, prompt_tokens: PromptTokens, max_prompt_length: int
) -> Corpus:
    """Validates a whole corpus, splits it by project and checks its labels; cuts no document yet (but see below).

    Documents are cut when a side of the split is first asked for, and kept on disk under the tokenizer's hash. Only
    labels with a measured agreement need every chunk here, for the hash that pins them.

    Raises:
        CorpusError: starts with ``file:line``; the manifest's own problems come before any row is read.
    """
    chunking = Chunking(settings.chunk_tokens, tokenizer_sha256(codec))
    started = time.perf_counter()
    manifest = load_manifest(
        settings.path,
        min_kappa=settings.min_kappa,
        allow_unmeasured=settings.allow_unmeasured,
        chunking=chunking,
    )
    index = scan(manifest, refuse)
    if not len(index.tasks):
        raise CorpusError(f"{manifest.path}:1: the corpus has no trajectory")
    split = split_tasks(index, settings)
    check_overlap(index, split, refuse)
    if split.note:
        print(f"{manifest.path}: {split.note}", file=sys.stderr)
    tasks = TaskReader(index, settings.chunk_tokens, codec, PlanCache(chunking.tokenizer_sha256))
    corpus = Corpus(manifest, index, split, tasks, settings, prompt_tokens, max_prompt_length)
    corpus.load_s = time.perf_counter() - started
    corpus.check_label_hashes()
    return corpus


def by_document(index: CorpusIndex) -> list[int]:
    """Positions of all tasks, those of one document together, else in file order: each document is read once."""
    order = np.arange(len(index.tasks))
    over = np.flatnonzero(index.tasks["document"] >= 0)
    _, first, which = np.unique(index.tasks["document"][over], return_index=True, return_inverse=True)
    order[over] = over[first[which]]
    return [int(position) for position in np.argsort(order, kind="stable")]


def split_tasks(index: CorpusIndex, settings: CorpusSettings) -> ProjectSplit:
    """The split of the projects that have tasks."""
    used = [index.projects[position] for position in np.unique(index.tasks["project"])]
    return split_projects(used, settings.split_seed, settings.val_fraction, settings.test_fraction)


class TaskReader:
    """Builds reading tasks from their places; keeps the last few documents and their plans in memory."""

    def __init__(self, index: CorpusIndex, chunk_tokens: int, codec: TokenCounter, cache: PlanCache) -> None:
        self.index, self.cache = index, cache
        self.chunking_s = 0.0
        self._chunk_tokens, self._counts = chunk_tokens, UnitCounts(codec)
        self._recent: OrderedDict[int, tuple[DocumentRow, ChunkPlan, tuple[str, ...]]] = OrderedDict()

    def read(self, position: int) -> ReadingTask:
        """The task at a position of the index.

        Raises:
            CorpusError: its document cannot be cut, or its ``exit_index`` does not fit the chunks.
        """
        return self.read_with_row(position)[0]

    def read_with_plan(self, position: int) -> tuple[ReadingTask, ChunkPlan]:
        """The task, and the plan that holds the token count of each of its chunks."""
        return self.read_with_row(position)[:2]

    def read_with_row(self, position: int) -> tuple[ReadingTask, ChunkPlan, TrajectoryRow]:
        """The task, its plan, and the row it was made of. Tasks of a recent document share one tuple of chunks."""
        place = self.index.tasks[position]
        file, line = self.index.place(place)
        raw = read_bytes(self.index.files, place)
        try:
            row = decode_row(raw)
            assert isinstance(row, TrajectoryRow)
            labels: Labels
            if row.chunks is UNSET:
                document, plan, chunks = self._document(int(place["document"]))
                labels = span_labels(plan, document.units, None if row.evidence is UNSET else row.evidence)
            else:
                chunks = tuple(chunk.text for chunk in row.chunks)
                labels = tuple(chunk.evidence for chunk in row.chunks)
                plan = self._timed(raw, OWN_CHUNKS, lambda: self._count_own(chunks))
            target = exit_target(labels, row.stop)
        except (RowError, ValueError) as error:
            raise CorpusError(f"{file}:{line}: {error}") from None
        task = ReadingTask(
            task_id=row.trajectory_id,
            project=self.index.projects[int(place["project"])],
            question=row.question,
            answers=None if row.answers is None else tuple(row.answers),
            chunks=chunks,
            evidence=labels,
            exit=target,
            source=f"{file}:{line}",
        )
        return task, plan, row

    def _document(self, position: int) -> tuple[DocumentRow, ChunkPlan, tuple[str, ...]]:
        if position in self._recent:
            self._recent.move_to_end(position)
            return self._recent[position]
        place = self.index.documents[position]
        raw = read_bytes(self.index.files, place)
        row = decode_row(raw)
        assert isinstance(row, DocumentRow)
        try:
            plan = self._timed(
                raw, self._chunk_tokens, lambda: plan_chunks(row.units, self._chunk_tokens, self._counts)
            )
        except ChunkingError as error:
            file, line = self.index.place(place)
            raise CorpusError(f"{file}:{line}: {error}") from None
        chunks = tuple(chunk_text(row.units, pieces) for pieces in plan.chunks)
        self._recent[position] = (row, plan, chunks)
        while len(self._recent) > 1 and (len(self._recent) > _RECENT_DOCUMENTS or self._held() > _RECENT_BYTES):
            self._recent.popitem(last=False)
        return row, plan, chunks

    def _held(self) -> int:
        """Bytes of the rows of the documents in memory."""
        return int(self.index.documents["length"][list(self._recent)].sum(dtype=np.int64))

    def document_plan(self, position: int) -> tuple[DocumentRow, ChunkPlan]:
        """A document and where it is cut."""
        row, plan, _ = self._document(position)
        return row, plan

    def _count_own(self, chunks: Sequence[str]) -> ChunkPlan:
        counts = tuple(self._counts.once(chunk) for chunk in chunks)
        return ChunkPlan(tuple(() for _ in chunks), counts)

    def _timed(self, raw: bytes, chunk_tokens: int, compute: Callable[[], ChunkPlan]) -> ChunkPlan:
        started = time.perf_counter()
        plan = self.cache.get(raw, chunk_tokens, compute)
        self.chunking_s += time.perf_counter() - started
        return plan


class TaskSet(Sequence[ReadingTask]):
    """The tasks of one side in file order; each is read from disk when asked for.

    Attributes:
        projects: the projects of this side that have tasks here, in alphabetical order.
    """

    def __init__(self, reader: TaskReader, positions: npt.NDArray[np.int64], projects: tuple[str, ...]) -> None:
        self._reader, self._positions = reader, positions
        self.projects = projects

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, item: int) -> ReadingTask: ...
    @overload
    def __getitem__(self, item: slice) -> TaskSet: ...
    def __getitem__(self, item: int | slice) -> ReadingTask | TaskSet:
        if isinstance(item, slice):
            chosen = self._positions[item]
            return TaskSet(self._reader, chosen, projects_of(self._reader.index, chosen))
        return self._reader.read(int(self._positions[item]))


class Corpus:
    """A validated corpus; ``split`` gives its tasks.

    Attributes:
        load_s: seconds of reading and validating.
    """

    def __init__(
        self,
        manifest: Manifest,
        index: CorpusIndex,
        split: ProjectSplit,
        reader: TaskReader,
        settings: CorpusSettings,
        prompt_tokens: PromptTokens,
        max_prompt_length: int,
    ) -> None:
        self.manifest, self.index, self.project_split, self.reader = manifest, index, split, reader
        self._settings, self._prompt_tokens, self._max_prompt = settings, prompt_tokens, max_prompt_length
        self._sides: dict[Side, TaskSet] = {}
        self._dropped: Counter[str] = Counter()
        self.load_s = 0.0

    @property
    def corpus_id(self) -> str:
        return self.manifest.corpus_id

    @property
    def sha256(self) -> str:
        """SHA-256 of the manifest's and every file's SHA-256, one hex line each."""
        lines = [self.manifest.sha256, *(entry.sha256 for entry in self.manifest.files)]
        return hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()

    @property
    def label_status(self) -> LabelStatus:
        return self.manifest.label_status

    @property
    def dropped(self) -> Mapping[str, int]:
        """Tasks that ``on_too_long=drop`` left out of the sides opened so far, by reason."""
        return dict(self._dropped)

    @property
    def chunking_s(self) -> float:
        """Seconds spent on cutting documents, or on reading the cuts from the cache."""
        return self.reader.chunking_s

    def split(self, side: Side) -> TaskSet:
        """The tasks of one side. Cuts its documents on the first call; the other sides are not touched.

        Raises:
            CorpusError: a task is too long and ``on_too_long`` is "refuse".
            Refused: the side is empty.
        """
        if side not in SIDES:
            raise Refused(f"split: got {side!r}, expected one of {', '.join(SIDES)}")
        if side not in self._sides:
            self._sides[side] = self._open_side(side)
        return self._sides[side]

    def _open_side(self, side: Side) -> TaskSet:
        positions = side_positions(self.index, self.project_split, side)
        if side == "val" and self._settings.max_val_tasks is not None:
            positions = self._first_by_hash(positions, self._settings.max_val_tasks)
        kept = [position for position in positions.tolist() if self._fits(position)]
        self.reader.cache.flush()
        if not kept:
            note = self.project_split.note or f"dropped: {self.dropped or 'none'}"
            raise Refused(f"{self.manifest.path}: the {side} split has no task ({note})")
        chosen = np.array(kept, np.int64)
        return TaskSet(self.reader, chosen, projects_of(self.index, chosen))

    def _first_by_hash(self, positions: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.int64]:
        def rank(position: int) -> bytes:
            row = decode_row(read_bytes(self.index.files, self.index.tasks[position]))
            assert isinstance(row, TrajectoryRow)
            return hashlib.sha256(row.trajectory_id.encode()).digest()

        if len(positions) <= limit:
            return positions
        return np.array(sorted(sorted(positions.tolist(), key=rank)[:limit]), np.int64)

    def _fits(self, position: int) -> bool:
        task, plan = self.reader.read_with_plan(position)
        problem = too_long(task, plan, self._settings.max_chunks, self._prompt_tokens, self._max_prompt)
        if problem is None:
            return True
        reason, message = problem
        if self._settings.on_too_long == "refuse":
            raise CorpusError(f"{task.source}: {message}")
        self._dropped[reason] += 1
        return False

    def check_label_hashes(self) -> None:
        """Holds measured agreements against the labels that are in the files.

        Raises:
            CorpusError: the labels changed after kappa was measured, or the block names no chunking while documents
                are cut here.
        """
        if not self.manifest.agreements or self.label_status == "unmeasured":
            return
        problem = label_hash_problem(self.manifest, self.index, self.reader)
        if problem is not None and not self._settings.allow_unmeasured:
            raise CorpusError(f"{self.manifest.path}:1: {problem}")
        if problem is not None:
            reasons = (*self.manifest.unmeasured, problem)
            self.manifest = replace(self.manifest, label_status="unmeasured", unmeasured=reasons)
        self.reader.cache.flush()


def too_long(
    task: ReadingTask, plan: ChunkPlan, max_chunks: int, prompt_tokens: PromptTokens | None, max_prompt_length: int
) -> tuple[str, str] | None:
    """(reason, message) if a task has too many chunks or its longest prompt does not fit; None if it does."""
    if len(task.chunks) > max_chunks:
        return "too_many_chunks", (
            f"trajectory {task.task_id!r} has {len(task.chunks)} chunks, corpus.max_chunks is {max_chunks}; "
            "raise it, or set corpus.on_too_long=drop"
        )
    if prompt_tokens is None:
        return None
    longest = max(range(len(plan.counts)), key=plan.counts.__getitem__)
    tokens = prompt_tokens(task.question, task.chunks[longest])
    if tokens > max_prompt_length:
        return "prompt_too_long", (
            f"trajectory {task.task_id!r}: the prompt of chunk {longest} with a full memory has {tokens} tokens, "
            f"max_prompt_length is {max_prompt_length}; raise it, lower corpus.chunk_tokens, or set "
            "corpus.on_too_long=drop"
        )
    return None


def label_hash_problem(manifest: Manifest, index: CorpusIndex, reader: TaskReader) -> str | None:
    """Why the measured agreements do not belong to the labels in the files, or None."""
    update: list[tuple[str, Labels]] = []
    stop: list[tuple[str, Labels]] = []
    for task in iter_tasks(index, reader):
        update.append((task.task_id, task.evidence))
        stop.append((task.task_id, exit_labels(task.exit, len(task.chunks))))
    cut_here = bool((index.tasks["document"] >= 0).any())
    for gate, agreement in manifest.agreements.items():
        where = f"labels.{gate}.agreement"
        if cut_here and None in (agreement.chunk_tokens, agreement.tokenizer_sha256):
            return f"{where}.chunk_tokens: got null, but this corpus has documents that are cut here; name the chunking"
        found = labels_sha256(update if gate == "update" else stop)
        if found != agreement.labels_sha256:
            return (
                f"{where}.labels_sha256: got {agreement.labels_sha256}, the labels in the files give {found}; they "
                "changed after kappa was measured"
            )
    return None


def iter_tasks(index: CorpusIndex, reader: TaskReader) -> Iterator[ReadingTask]:
    """All tasks in file order, whatever their side."""
    for position in range(len(index.tasks)):
        yield reader.read(position)


def side_positions(index: CorpusIndex, split: ProjectSplit, side: Side) -> npt.NDArray[np.int64]:
    """[n] positions of the tasks of one side, ascending."""
    chosen = [split.side_of.get(project) == side for project in index.projects]
    return np.flatnonzero(np.array(chosen, bool)[index.tasks["project"]])


def projects_of(index: CorpusIndex, positions: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """Names of the projects of some tasks, in alphabetical order."""
    used: Any = np.unique(index.tasks["project"][positions])
    return tuple(sorted(index.projects[position] for position in used.tolist()))
