"""Metrics of a batch of single-turn responses under verl's names, each with its denominator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poimen_exp.solo.estimators import Estimate
from poimen_exp.solo.ragged import Ragged
from poimen_exp.solo.settings import AlgorithmSettings
from poimen_exp.solo.task import RolloutBatch

Named = tuple[dict[str, float], dict[str, int]]
"""Metrics and their denominators."""


def batch_metrics(
    batch: RolloutBatch,
    found: Estimate,
    values: Ragged | None,
    algorithm: AlgorithmSettings,
    max_prompt_length: int,
    max_response_length: int,
) -> Named:
    """verl 0.9.1's ``compute_data_metrics``, and its two of KL in the reward: scores and rewards count responses,
    advantages, returns and values count response tokens.
    """
    assert batch.scores is not None
    out: Named = ({}, {})
    _spread(out, "critic/score", batch.scores)
    _spread(out, "critic/rewards", torch.stack([row.sum() for row in found.rewards]))
    _spread(out, "critic/advantages", torch.cat(found.advantages))
    _spread(out, "critic/returns", torch.cat(found.returns))
    _spread(out, "response_length", _lengths([len(row.response) for row in batch.rows]), max_response_length)
    _spread(out, "prompt_length", _lengths([len(row.prompt.ids) for row in batch.rows]), max_prompt_length)
    groups = len(set(batch.group.tolist()))
    _put(out, "advantage/singletons", found.singletons / groups, groups)
    if values is not None:
        _values(out, torch.cat(values).cpu(), torch.cat(found.returns))
    if found.kl is not None:
        means = torch.stack([row.mean() for row in found.kl])
        _put(out, "actor/reward_kl_penalty", float(means.mean()), len(means))
        _put(out, "actor/reward_kl_penalty_coeff", algorithm.kl_coef, len(means))
    return out


def _values(out: Named, values: Tensor, returns: Tensor) -> None:
    _spread(out, "critic/values", values)
    explained = 1.0 - torch.var(returns - values) / (torch.var(returns) + 1e-5)
    _put(out, "critic/vf_explained_var", float(explained), len(values))


def _spread(out: Named, name: str, values: Tensor, limit: int | None = None) -> None:
    """Mean, largest and smallest; with ``limit`` also the share that reached it."""
    count = values.numel()
    _put(out, f"{name}/mean", float(values.mean()), count)
    _put(out, f"{name}/max", float(values.max()), count)
    _put(out, f"{name}/min", float(values.min()), count)
    if limit is not None:
        _put(out, f"{name}/clip_ratio", float((values == limit).float().mean()), count)


def _put(out: Named, name: str, value: float, count: int) -> None:
    if math.isfinite(value):  # else the step is skipped and named, and the record takes no such number
        out[0][name], out[1][name] = value, count


def _lengths(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
