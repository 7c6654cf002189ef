"""Position leak: how much of a label the place of a chunk gives away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from poimen_exp.corpus.audit.facts import Facts

WARN_ABOVE = 0.65
EXIT_MARGIN = 0.05
"""Exit is the last of several pieces of evidence, which is late by nature: only more than that is a leak."""
MAX_CHUNKS = 300_000
_FOLDS, _RESAMPLES, _LEAVES = 5, 500, 48


@dataclass(frozen=True)
class Auroc:
    """Area under the ROC curve of a reader that sees positions only; None where it is undefined or unknown.

    Attributes:
        low, high: 95 % interval, projects drawn with replacement; None below three projects.
        by_chance: exit only: the mean for evidence put at random places of each trajectory.
        beyond_chance: exit only: ``value`` is above all of these random placements and 0.05 above their mean.
        chunks: labelled chunks that were looked at, of ``known`` that there are.
        projects: that these chunks are of.
        uniform: all of them have one label or one place, so that there is nothing to tell apart.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    by_chance: float | None = None
    beyond_chance: bool = True
    chunks: int = 0
    known: int = 0
    projects: int = 0
    uniform: bool = False


def position_leak(facts: Facts, gate: str, seed: int = 0) -> Auroc:
    """How well chunk index and relative position predict ``gate`` ("evidence" or "exit") of projects not fitted on.

    A decision tree is fitted to the other projects' chunks (5 folds) and scores those of the held-out ones; pairs are
    compared within a fold. Corpora over ``MAX_CHUNKS`` chunks are judged by a sample of trajectories. Unknown
    of one project, or where no tree has two leaves.
    """
    known = int(np.count_nonzero(_labels(facts, gate) >= 0))
    facts = _sampled(facts, known, seed)
    labels = _labels(facts, gate)
    rows = np.flatnonzero(labels >= 0)
    projects = len(np.unique(facts.project[facts.chunk_task[rows]]))
    table = _pair_table(facts, labels, rows, seed)
    if table is None:
        uniform = len(np.unique(labels[rows])) < 2 or len({*zip(*facts.at(rows), strict=True)}) < 2
        return Auroc(None, chunks=len(rows), known=known, projects=projects, uniform=uniform)
    value = _area(*(counts.sum(0) for counts in table))
    found = Auroc(value, *_interval(table, seed), chunks=len(rows), known=known, projects=projects)
    if gate == "evidence":
        return found
    chance = _chance(facts, rows, seed)
    beyond = bool(chance) and value > max(chance) and value > float(np.mean(chance)) + EXIT_MARGIN
    return replace(found, by_chance=float(np.mean(chance)) if chance else None, beyond_chance=beyond)


def _labels(facts: Facts, gate: str) -> npt.NDArray[Any]:
    return facts.evidence if gate == "evidence" else facts.exit_here


def _chance(facts: Facts, rows: npt.NDArray[np.int64], seed: int) -> list[float]:
    """Areas for exit after the evidence of each trajectory was placed at random; fewer for large corpora."""
    tables = (
        _pair_table(facts, _shuffled_exit(facts, seed + 1 + turn), rows, seed)
        for turn in range(20 if len(rows) < 50_000 else 5)
    )
    return [_area(*(counts.sum(0) for counts in table)) for table in tables if table is not None]


def leaks(gate: str, result: Auroc) -> bool:
    """Whether to warn: above 0.65, and for exit also beyond what its lateness alone gives."""
    if result.value is None or result.value <= WARN_ABOVE:
        return False
    return gate == "evidence" or result.beyond_chance


def _sampled(facts: Facts, known: int, seed: int) -> Facts:
    """All trajectories, or so many of them that about ``MAX_CHUNKS`` of the ``known`` labelled chunks stay."""
    if known <= MAX_CHUNKS:
        return facts
    return facts.of_tasks(np.random.default_rng(seed).random(len(facts.n_chunks)) < MAX_CHUNKS / known)


def _pair_table(
    facts: Facts, labels: npt.NDArray[Any], rows: npt.NDArray[np.int64], seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """[P, F, S] positives and negatives by project, fold and rank of the score; None where no fold has both classes and
    a tree that splits."""
    from sklearn.model_selection import GroupKFold
    from sklearn.tree import DecisionTreeClassifier

    y = labels[rows]
    _, project = np.unique(facts.project[facts.chunk_task[rows]], return_inverse=True)
    n_projects = int(project.max()) + 1 if len(project) else 0
    if n_projects < 2 or len(np.unique(y)) < 2:
        return None
    x = np.stack(facts.at(rows), 1)
    folds = min(_FOLDS, n_projects)
    positives = np.zeros((n_projects, folds, _LEAVES + 1), np.int64)
    negatives = np.zeros_like(positives)
    for fold, (fitted, held) in enumerate(GroupKFold(folds, shuffle=True, random_state=seed).split(x, y, project)):
        leaf = max(20, len(fitted) // 200)
        tree = DecisionTreeClassifier(max_leaf_nodes=_LEAVES, min_samples_leaf=leaf, random_state=seed)
        if tree.fit(x[fitted], y[fitted]).get_n_leaves() < 2:  # one class, one place, or too few chunks to split
            continue
        score = tree.predict_proba(x[held])[:, 1]
        rank = np.unique(score, return_inverse=True)[1]
        for table, label in ((positives, 1), (negatives, 0)):
            of_label = y[held] == label
            np.add.at(table[:, fold], (project[held][of_label], rank[of_label]), 1)
    if not (positives.sum((0, 2)) * negatives.sum((0, 2))).any():
        return None
    return positives, negatives


def _area(positives: npt.NDArray[Any], negatives: npt.NDArray[Any]) -> float:
    """Share of (positive, negative) pairs of one fold in the right order, ties half; [F, S] counts by rank."""
    below = np.cumsum(negatives, -1) - negatives
    right = (positives * (below + 0.5 * negatives)).sum()
    pairs = (positives.sum(-1) * negatives.sum(-1)).sum()
    return float(right / pairs) if pairs else float("nan")


def _interval(
    table: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], seed: int
) -> tuple[float | None, float | None]:
    positives, negatives = table
    n_projects = len(positives)
    if n_projects < 3:
        return None, None
    rng = np.random.default_rng(seed)
    areas = []
    for _ in range(_RESAMPLES):
        times = np.bincount(rng.integers(0, n_projects, n_projects), minlength=n_projects)
        areas.append(_area(np.tensordot(times, positives, 1), np.tensordot(times, negatives, 1)))
    low, high = np.nanquantile(areas, [0.025, 0.975])
    return float(low), float(high)


def _shuffled_exit(facts: Facts, seed: int) -> npt.NDArray[Any]:
    """Exit labels after the evidence labels of each trajectory were put in random order; exit follows the last one."""
    known = np.flatnonzero(facts.evidence >= 0)
    draw = np.random.default_rng(seed).random(len(known))
    evidence = facts.evidence.copy()
    evidence[known] = facts.evidence[known[np.lexsort((draw, facts.chunk_task[known]))]]
    last = np.full(len(facts.n_chunks), -1)
    held = np.flatnonzero(evidence == 1)
    np.maximum.at(last, facts.chunk_task[held], facts.position[held])
    exit_here = (facts.position == last[facts.chunk_task]).astype(np.int32)
    return np.where(facts.exit_here < 0, -1, exit_here)
