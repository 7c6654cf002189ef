"""The whole check: problems the loader would refuse, then the audits of what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from poimen_exp.corpus.audit.facts import Facts, gather
from poimen_exp.corpus.audit.near import NearDuplicates, near_duplicates
from poimen_exp.corpus.audit.position import EXIT_MARGIN, WARN_ABOVE, Auroc, leaks, position_leak
from poimen_exp.corpus.cache import PlanCache
from poimen_exp.corpus.chunking import ChunkPlan, TokenCounter, tokenizer_sha256
from poimen_exp.corpus.contract import Chunking
from poimen_exp.corpus.index import CorpusIndex, scan
from poimen_exp.corpus.loader import PromptTokens, TaskReader, by_document, label_hash_problem, split_tasks, too_long
from poimen_exp.corpus.manifest import Manifest, load_manifest
from poimen_exp.corpus.overlap import check_overlap
from poimen_exp.corpus.split import ProjectSplit
from poimen_exp.errors import CorpusError, Refused
from poimen_exp.gates.types import ReadingTask
from poimen_exp.wording import counted

if TYPE_CHECKING:
    from poimen_exp.solo.settings import CorpusSettings

KEPT_PROBLEMS = 1000


@dataclass(frozen=True)
class Audit:
    """One line of the audit table. ``value`` None: the question does not arise for this corpus, or it is too small."""

    name: str
    value: float | None
    shown: str
    warn: bool
    meaning: str

    @property
    def verdict(self) -> str:
        """``warning``, ``ok``, or ``-`` where nothing was measured."""
        return "warning" if self.warn else "-" if self.value is None else "ok"


@dataclass
class Problems:
    """Collects problems instead of raising them; keeps the first ``KEPT_PROBLEMS``."""

    found: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, message: str) -> None:
        self.count += 1
        if len(self.found) < KEPT_PROBLEMS:
            self.found.append(message)

    def report(self, file: str, line: int, message: str) -> None:
        self.add(f"{file}:{line}: {message}")


@dataclass(frozen=True)
class CheckReport:
    """What ``poimen corpus check`` says. ``facts`` is None where nothing could be read."""

    path: str
    corpus_id: str
    label_status: str
    problems: tuple[str, ...]
    n_problems: int
    dropped: Mapping[str, int]
    audits: tuple[Audit, ...]
    facts: Facts | None
    split: ProjectSplit | None

    @property
    def warnings(self) -> tuple[Audit, ...]:
        return tuple(audit for audit in self.audits if audit.warn)


def check_corpus(
    settings: CorpusSettings, codec: TokenCounter, prompt_tokens: PromptTokens | None, max_prompt_length: int
) -> CheckReport:
    """Looks at every row of a corpus and lists all problems, each with file and line, then audits the rest.

    Args:
        prompt_tokens: as for ``open_corpus``; None leaves prompt lengths out.
    """
    problems = Problems()
    chunking = Chunking(settings.chunk_tokens, tokenizer_sha256(codec))
    try:
        manifest = load_manifest(settings.path, min_kappa=settings.min_kappa, allow_unmeasured=True, chunking=chunking)
    except CorpusError as error:
        problems.add(str(error))
        return CheckReport(str(settings.path), "", "", tuple(problems.found), 1, {}, (), None, None)
    if not settings.allow_unmeasured:
        for reason in manifest.unmeasured:
            problems.report(str(manifest.path), 1, reason)
    index = scan(manifest, problems.report)
    split = _split(index, settings, manifest, problems)
    if split is not None:
        check_overlap(index, split, problems.report)
    reader = TaskReader(index, settings.chunk_tokens, codec, PlanCache(chunking.tokenizer_sha256))
    dropped: Counter[str] = Counter()

    def judge(task: ReadingTask, plan: ChunkPlan) -> bool:
        problem = too_long(task, plan, settings.max_chunks, prompt_tokens, max_prompt_length)
        if problem is not None and settings.on_too_long == "drop":
            dropped[problem[0]] += 1
        elif problem is not None:
            problems.add(f"{task.source}: {problem[1]}")
        return problem is None

    facts = gather(index, reader, by_document(index), judge, lambda error: problems.add(str(error)))
    if manifest.agreements and not problems.count:
        changed = label_hash_problem(manifest, index, reader)
        if changed is not None and not settings.allow_unmeasured:
            problems.report(str(manifest.path), 1, changed)
    reader.cache.close()
    audits = audit_table(facts, near_duplicates(index, split) if split else None) if len(facts.n_chunks) else ()
    return CheckReport(
        str(manifest.path), manifest.corpus_id, manifest.label_status, tuple(problems.found), problems.count,
        dict(dropped), audits, facts if len(facts.n_chunks) else None, split,
    )  # fmt: skip


def _split(index: CorpusIndex, settings: CorpusSettings, manifest: Manifest, problems: Problems) -> ProjectSplit | None:
    if not len(index.tasks):
        problems.report(str(manifest.path), 1, "the corpus has no trajectory")
        return None
    try:
        return split_tasks(index, settings)
    except Refused as error:
        problems.report(str(manifest.path), 1, str(error))
        return None


def audit_table(facts: Facts, near: NearDuplicates | None) -> tuple[Audit, ...]:
    """The audits in the order of the table."""
    leak = [_leak_audit(facts, gate) for gate in ("evidence", "exit")]
    near_audit = [] if near is None else [_near_audit(near)]
    return (*leak, *_label_audits(facts), *_chunk_audits(facts), *near_audit)


def _leak_audit(facts: Facts, gate: str) -> Audit:
    result = position_leak(facts, gate)
    meaning = f"AUROC of position alone for {gate}, on projects not fitted on; warns above {WARN_ABOVE}"
    if gate == "exit":
        meaning += f", if {EXIT_MARGIN} above what random places of the evidence give"
    return Audit(f"position leak: {gate}", result.value, _auroc_text(result), leaks(gate, result), meaning)


def _auroc_text(result: Auroc) -> str:
    size = f"{counted(result.known, 'chunk')}, {counted(result.projects, 'project')}"
    if result.chunks < result.known:
        size = f"sample of {result.chunks:,} of {size}"
    if result.value is None:
        return f"{'undefined (one class, or one place)' if result.uniform else 'too few to say'}: {size}"
    chance = "" if result.by_chance is None else f", random places {result.by_chance:.3f}"
    interval = " without an interval" if result.low is None else f" [{result.low:.3f}, {result.high:.3f}] 95 %"
    return f"AUROC {result.value:.3f}{interval}{chance}, {size}"


def _share(name: str, part: int, whole: int, limit: float, meaning: str) -> Audit:
    if not whole:
        return Audit(name, None, "not asked", False, meaning)
    value = part / whole
    return Audit(
        name, value, f"{value:.1%} ({part:,} of {whole:,})", value > limit, f"{meaning}; warns above {limit:.0%}"
    )


def _label_audits(facts: Facts) -> tuple[Audit, ...]:
    positive, known = int((facts.evidence == 1).sum()), int((facts.evidence >= 0).sum())
    balance = _share("chunks with evidence", positive, known, 0.9, "share of labelled chunks that hold evidence")
    one_class = known > 0 and positive in (0, known)
    rare = bool(known) and positive / known < 0.005
    balance = Audit(
        balance.name, balance.value, balance.shown, balance.warn or one_class or rare,
        balance.meaning + ", below 0.5%, and for one class",
    )  # fmt: skip
    asked = facts.spelled >= 0
    return (
        balance,
        _share(
            "unknown evidence labels", len(facts.evidence) - known, len(facts.evidence), 0.1, "chunks without a label"
        ),
        _share(
            "unknown exit targets",
            int((facts.exit_index == -2).sum()),
            len(facts.n_chunks),
            0.1,
            "trajectories whose labels do not say where to stop",
        ),
        _share(
            "never",
            int((facts.exit_index == -1).sum()),
            len(facts.n_chunks),
            0.9,
            "trajectories that must be read to the end",
        ),
        _share(
            "answer in evidence-free chunks",
            int((facts.spelled == 1).sum()),
            int(asked.sum()),
            0.2,
            "trajectories whose short answer stands in a chunk labelled evidence-free",
        ),
    )


def _chunk_audits(facts: Facts) -> tuple[Audit, ...]:
    lengths = facts.n_chunks
    return (
        _share(
            "evidence cut by chunk borders",
            int(facts.cut.sum()),
            int(facts.spans.sum()),
            0.1,
            "passages in more than one chunk; each piece counts as evidence",
        ),
        _share(
            "chunks without their header",
            int(facts.headless.sum()),
            int(lengths.sum()),
            0.0,
            "chunks that start with a unit without header below others that have one",
        ),
        _share("one-chunk trajectories", int((lengths == 1).sum()), len(lengths), 0.1, "nothing to stop early in"),
        Audit(
            "chunks a trajectory",
            float(np.median(lengths)),
            f"min {lengths.min()}, median {np.median(lengths):g}, max {lengths.max()}",
            False,
            "how long readings are",
        ),
    )


def _near_audit(near: NearDuplicates) -> Audit:
    meaning = "different texts of val and test (12 words or more) that stand in train too, equal or nearly"
    if near.sampled:
        meaning += "; of large corpora a sample by hash: texts compared, of all that stand there, repeats counted"
    audit = _share("text shared across the split", near.equal + near.near, near.held_out, 0.01, meaning)
    shown = f"{audit.shown}: {near.equal:,} equal, {near.near:,} nearly" if near.held_out else audit.shown
    if near.sampled:
        shown += f"; sample of {near.compared:,} of {near.texts:,} texts"
    return Audit(audit.name, audit.value, shown, audit.warn, audit.meaning)
