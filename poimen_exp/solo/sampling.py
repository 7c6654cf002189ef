"""Draws ids from logits: temperature, top-k, top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from poimen_exp.errors import RunFailed
from poimen_exp.gates.types import Sampling


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[N] sampled ids, and [N] log-prob of each at the sampling temperature before top-p and top-k.

    Temperature 0 takes the likeliest id and gives its log-prob at temperature 1.

    Raises:
        RunFailed: logits that are not finite. They make a whole row NaN, of which argmax would give some id.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    log_probs = torch.log_softmax(scaled, -1)
    if log_probs[:, 0].isnan().any():
        raise RunFailed(
            "the model's logits are not finite: its weights have diverged. Go back to an older checkpoint, or begin "
            "anew with a lower rate (actor_rollout_ref.actor.optim.lr)"
        )
    if sampling.temperature == 0.0:
        token = scaled.argmax(-1)
    else:
        token = torch.multinomial(_filtered(log_probs, sampling).exp(), 1, generator=generator)[:, 0]
    return token, log_probs.gather(-1, token[:, None])[:, 0]


def _filtered(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs with ids outside top-k and top-p at minus infinity; the likeliest id always stays."""
    if sampling.top_k > 0:
        floor = log_probs.topk(min(sampling.top_k, log_probs.shape[-1]), -1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < floor, -torch.inf)
    if sampling.top_p < 1.0:
        ranked, order = log_probs.sort(-1, descending=True)
        probs = torch.softmax(ranked, -1)
        beyond = probs.cumsum(-1) - probs >= sampling.top_p  # mass before this id already reaches top-p
        log_probs = log_probs.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return log_probs
