"""How long trajectories are, where evidence lies, and how large the sides of the split are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from poimen_exp.corpus.audit.facts import Facts
from poimen_exp.corpus.split import SIDES, ProjectSplit
from poimen_exp.wording import counted


@dataclass(frozen=True)
class CorpusStats:
    """Shares are of labelled chunks or of trajectories with known labels; None where there are none."""

    trajectories: int
    projects: int
    chunks: int
    tokens: int
    chunks_per_trajectory: tuple[int, float, int]
    longest_chunk_tokens: int
    evidence_free: float | None
    evidence_chunks_1_2_3: tuple[float, float, float] | None
    exit_quantiles: tuple[float, ...] | None
    """10, 25, 50, 75 and 90 % of the known exit indices."""
    never: int
    chunks_after_exit: float | None
    sides: Mapping[str, tuple[int, int]]
    """Projects and trajectories of each side."""


def corpus_stats(facts: Facts, split: ProjectSplit) -> CorpusStats:
    """Statistics of all trajectories."""
    known = facts.evidence >= 0
    held = np.bincount(facts.chunk_task[facts.evidence == 1], minlength=len(facts.n_chunks))
    some = held[held > 0]
    stops = facts.exit_index >= 0
    exits = facts.exit_index[stops]
    after = 1 - (exits + 1) / facts.n_chunks[stops]
    return CorpusStats(
        trajectories=len(facts.n_chunks),
        projects=len(np.unique(facts.project)),
        chunks=len(facts.evidence),
        tokens=int(facts.tokens.sum(dtype=np.int64)),
        chunks_per_trajectory=(int(facts.n_chunks.min()), float(np.median(facts.n_chunks)), int(facts.n_chunks.max())),
        longest_chunk_tokens=int(facts.longest.max()),
        evidence_free=float((facts.evidence[known] == 0).mean()) if known.any() else None,
        evidence_chunks_1_2_3=(float((some == 1).mean()), float((some == 2).mean()), float((some > 2).mean()))
        if len(some) else None,
        exit_quantiles=tuple(float(q) for q in np.quantile(exits, [0.1, 0.25, 0.5, 0.75, 0.9])) if len(exits) else None,
        never=int((facts.exit_index == -1).sum()),
        chunks_after_exit=float(after.mean()) if len(exits) else None,
        sides={side: _size(facts, split, side) for side in SIDES},
    )  # fmt: skip


def _size(facts: Facts, split: ProjectSplit, side: str) -> tuple[int, int]:
    chosen = np.array([split.side_of.get(project) == side for project in facts.projects], bool)
    projects = sum(where == side for where in split.side_of.values())
    return projects, int(chosen[facts.project].sum())


def shown_stats(stats: CorpusStats) -> dict[str, str]:
    """The statistics as a person reads them."""
    least, middle, most = stats.chunks_per_trajectory
    exits = stats.exit_quantiles and ", ".join(f"{place:g}" for place in stats.exit_quantiles)
    held = stats.evidence_chunks_1_2_3 and ", ".join(map(_share, stats.evidence_chunks_1_2_3))
    sides = {
        side: f"{counted(projects, 'project')}, {counted(tasks, 'trajectory', 'trajectories')}"
        for side, (projects, tasks) in stats.sides.items()
    }
    return {
        "trajectories": f"{stats.trajectories:,}",
        "projects": f"{stats.projects:,}",
        "chunks": f"{stats.chunks:,}",
        "tokens": f"{stats.tokens:,}",
        "chunks of a trajectory": f"{least:,} to {most:,}, median {middle:g}",
        "longest chunk": counted(stats.longest_chunk_tokens, "token"),
        "chunks without evidence": _share(stats.evidence_free),
        "trajectories with 1, 2, more chunks of evidence": held or "unknown",
        "exit index, at 10, 25, 50, 75, 90 %": exits or "unknown",
        "trajectories with the exit target never": f"{stats.never:,}",
        "chunks after the exit": _share(stats.chunks_after_exit),
        **sides,
    }


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}".replace("%", " %")
