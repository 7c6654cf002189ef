"""Intervals over seeds: Student's t for one setting, a paired bootstrap for the difference of two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. ``low`` and ``high`` bound the 95 % interval; None with fewer than two seeds."""

    mean: float
    low: float | None
    high: float | None
    n: int


def t_interval(values: Sequence[float]) -> Estimate:
    """Mean and t-interval (n - 1 degrees of freedom) of one value a seed.

    Args:
        values: at least one.
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Estimate(mean, None, None, n)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(t.ppf(0.5 + LEVEL / 2, n - 1)) * deviation / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """Mean of ``second - first`` over the seeds that both have, with a percentile bootstrap over seeds.

    Args:
        first: seed to value.
        second: seed to value.

    Returns:
        None where no seed is in both. The resampling is seeded: one report gives one interval.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    differences = np.array([second[seed] - first[seed] for seed in seeds])
    mean = float(differences.mean())
    if len(seeds) < 2:
        return Estimate(mean, None, None, 1)
    picks = np.random.default_rng(0).integers(0, len(seeds), size=(RESAMPLES, len(seeds)))
    means = differences[picks].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high), len(seeds))
