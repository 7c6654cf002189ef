"""The actor objective of one micro-batch, by verl's own functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from poimen_exp.solo.settings import LossSettings


@dataclass(frozen=True)
class MiniBatchSize:
    """What losses are divided by: response tokens and rows of the whole mini-batch, over all its micro-batches."""

    tokens: int
    rows: int


@dataclass(frozen=True)
class LossBatch:
    """Inputs of the objective for N rows of up to R response tokens; all are [N, R]."""

    log_probs: Tensor
    entropy: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor | None
    advantages: Tensor
    mask: Tensor
    """bool, True on the tokens that count."""


@lru_cache(maxsize=8)
def actor_config(loss: LossSettings) -> Any:
    """verl's actor configuration with these loss settings."""
    from verl.workers.config import FSDPActorConfig

    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=loss.clip_ratio,
        clip_ratio_low=loss.clip_ratio_low,
        clip_ratio_high=loss.clip_ratio_high,
        clip_ratio_c=loss.clip_ratio_c,
        loss_agg_mode=loss.loss_agg_mode,
        loss_scale_factor=loss.loss_scale_factor,
        entropy_coeff=loss.entropy_coeff,
        use_kl_loss=loss.use_kl_loss,
        kl_loss_coef=loss.kl_loss_coef,
        kl_loss_type=loss.kl_loss_type,
    )


def actor_loss(batch: LossBatch, size: MiniBatchSize, loss: LossSettings) -> tuple[Tensor, dict[str, float]]:
    """This micro-batch's share of the mini-batch's loss, and its share of every metric: shares add up.

    Clipped and dual-clipped policy loss, minus entropy, plus KL to the reference: verl's ``ppo_loss``
    (verl 0.9.1, workers/utils/losses.py) on padded tensors.

    Returns:
        The loss to call ``backward`` on, and metrics under verl's names.
    """
    from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, kl_penalty

    config = actor_config(loss)
    shared: dict[str, Any] = {
        "dp_size": 1,
        "batch_num_tokens": size.tokens,
        "global_batch_size": size.rows,
        "loss_scale_factor": config.loss_scale_factor,
    }
    config.global_batch_info.update(shared)
    mask = batch.mask.float()
    pg_loss, pg_metrics = compute_policy_loss_vanilla(
        old_log_prob=batch.old_log_probs,
        log_prob=batch.log_probs,
        advantages=batch.advantages,
        response_mask=mask,
        loss_agg_mode=loss.loss_agg_mode,
        config=config,
    )
    weight = float(batch.mask.sum()) / size.tokens  # verl's pg metrics are means over this micro-batch's tokens
    metrics = {name: value * weight for name, value in pg_metrics.items()}
    entropy = agg_loss(batch.entropy, mask, loss.loss_agg_mode, **shared)
    total = pg_loss
    if loss.entropy_coeff:
        total = total - loss.entropy_coeff * entropy
    metrics |= {"actor/pg_loss": pg_loss.item(), "actor/entropy": entropy.item()}
    if loss.use_kl_loss:
        assert batch.ref_log_probs is not None
        kl = agg_loss(
            kl_penalty(batch.log_probs, batch.ref_log_probs, loss.kl_loss_type), mask, loss.loss_agg_mode, **shared
        )
        total = total + loss.kl_loss_coef * kl
        metrics["actor/kl_loss"] = kl.item()
    metrics["actor/loss"] = total.item()
    return total, metrics


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum of the shares that micro-batches report."""
    out: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out.get(name, 0.0) + value
    return out


def finite(value: Tensor | float) -> bool:
    """Whether every entry is a number."""
    return bool(torch.isfinite(torch.as_tensor(value)).all())
