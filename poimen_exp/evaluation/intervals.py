"""Means with intervals that respect what is independent: projects first, tasks where there are too few projects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000
_FEWEST_CLUSTERS = 5


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % bootstrap interval.

    Attributes:
        count: values that the mean is over.
        counts: what each of them is of, as ``turns`` or ``trajectories``.
        resampled: what the bootstrap drew, ``projects`` or ``tasks``.
    """

    mean: float
    low: float
    high: float
    count: int
    counts: str
    resampled: str

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] ({self.count:,})"


def estimate(
    values: Sequence[float], projects: Sequence[str], tasks: Sequence[str], counts: str, seed: int = 0
) -> Estimate | None:
    """Mean of ``values`` and a bootstrap interval over whole projects, or over tasks below five projects.

    Args:
        values: one a denominator unit (a turn, a trajectory).
        projects, tasks: of each value.
        counts: the plural of that unit.

    Returns:
        None where there are no values.
    """
    if not values:
        return None
    resampled = "projects" if len(set(projects)) >= _FEWEST_CLUSTERS else "tasks"
    names, cluster = np.unique(np.asarray(projects if resampled == "projects" else tasks), return_inverse=True)
    sums = np.bincount(cluster, weights=np.asarray(values, dtype=float))
    sizes = np.bincount(cluster).astype(float)
    picks = np.random.default_rng(seed).integers(0, len(names), (_RESAMPLES, len(names)))
    means = sums[picks].sum(1) / sizes[picks].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    mean = float(np.mean(np.asarray(values, dtype=float)))
    return Estimate(mean, float(low), float(high), len(values), counts, resampled)
