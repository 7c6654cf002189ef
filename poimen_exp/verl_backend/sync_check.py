"""Whether the sampler has the trainer's adapter, measured in log-probs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from poimen_exp.errors import RunFailed

LEAST_SHARE = 0.5
MOST_TIMES = 1.5
LEAST_EFFECT = 1e-3
"""Mean change of a log-prob below which a known adapter did nothing, in nats."""


@dataclass(frozen=True)
class SyncReport:
    """Means over N sampled tokens, in nats.

    Attributes:
        sampler_trainer: ``|sampler - trainer|``: numerics, if the sync works.
        trainer_base: ``|trainer - base|``: what the adapter changes.
        share: slope of ``sampler - base`` on ``trainer - base``: 1 if the sampler has the adapter, 0 if it samples from
            the base; numerics move it little, because they are not aligned with the adapter's effect.
        tokens: N.
    """

    sampler_trainer: float
    trainer_base: float
    share: float
    tokens: int


def compare(sampler: Tensor, trainer: Tensor, base: Tensor) -> SyncReport:
    """Report for [N] log-probs of the same tokens under the sampler, the trainer, and the trainer without adapter."""
    sampler, trainer, base = sampler.double(), trainer.double(), base.double()
    effect = trainer - base
    power = float((effect * effect).sum())
    return SyncReport(
        sampler_trainer=float((sampler - trainer).abs().mean()),
        trainer_base=float(effect.abs().mean()),
        share=float(((sampler - base) * effect).sum()) / power if power else 0.0,
        tokens=sampler.numel(),
    )


def require_synced(report: SyncReport) -> None:
    """Refuses a sampler that does not have the known adapter.

    Raises:
        RunFailed: with the three numbers and what to look at.
    """
    numbers = (
        f"sampler/trainer {report.sampler_trainer:.2g}, trainer/base {report.trainer_base:.2g} nats a token, share of "
        f"the adapter {report.share:.2f}, {report.tokens} tokens"
    )
    if not report.trainer_base >= LEAST_EFFECT:
        raise RunFailed(f"LoRA sync check: a known adapter does not change the trainer's log-probs ({numbers})")
    if not LEAST_SHARE <= report.share <= MOST_TIMES:
        raise RunFailed(
            f"LoRA sync check: the sampler does not have the trainer's adapter ({numbers}); expected a share near 1. "
            "Check actor.strategy=fsdp2, rollout.load_format=safetensors, and that lora_alpha reaches the sampler"
        )


def not_empty(named: Iterable[tuple[str, Tensor]], lora: bool) -> Iterable[tuple[str, Tensor]]:
    """``named`` unchanged, its first tensor looked at before a sampler is.

    Raises:
        RuntimeError: there is none, or (``lora``) not one ``lora_B`` among them: the sampler would go on with the
            weights it has, or hang.
    """
    if lora:
        tensors = list(named)
        if not any("lora_B" in name for name, _ in tensors):
            raise RuntimeError(
                f"weight sync: {len(tensors)} tensors, none of them lora_B; expected the adapter. With "
                "actor.strategy=fsdp on one GPU verl 0.9.1 sends none: set actor_rollout_ref.actor.strategy=fsdp2 "
                "and actor_rollout_ref.ref.strategy=fsdp2"
            )
        return tensors
    rest = iter(named)
    first = next(rest, None)
    if first is None:
        raise RuntimeError("weight sync: 0 tensors, expected the model's weights; the sampler would keep its old ones")
    return itertools.chain([first], rest)
