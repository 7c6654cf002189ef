"""Log-probs of sampled ids under a model, with shared prefixes computed once (with gradient too)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poimen_exp.solo.fused import chosen_log_probs
from poimen_exp.solo.rows import PackedRows


@dataclass(frozen=True)
class TokenStats:
    """[N, R] log-prob of each sampled id and entropy of its distribution, at the sampling temperature; 0 on padding."""

    log_probs: Tensor
    entropy: Tensor


def token_stats(model: Any, packed: PackedRows, temperature: float, *, entropy_grad: bool = False) -> TokenStats:
    """Log-probs and entropies of the response ids.

    The log-prob is that of ``logits / temperature`` over the whole vocabulary, as verl has it: top-p and top-k choose
    tokens and do not enter it. Differentiable through shared prefixes.

    Args:
        model: a causal language model (LoRA-wrapped or not).
        packed: the rows.
        temperature: sampling temperature, above 0.
        entropy_grad: whether entropies are differentiable too: several float32 copies of the logits more.
    """
    cache, past_mask = prefill_prefixes(model, packed.prefix_ids, packed.prefix_mask, packed.prefix_of)
    own_ids = torch.cat([packed.suffix_ids, packed.response_ids], 1)
    own_mask = torch.cat([packed.suffix_mask, packed.response_mask], 1)
    width = packed.response_ids.shape[1]
    logits = extend(model, own_ids, own_mask, cache, past_mask, keep=width + 1)  # [N, R + 1, V]
    kept = packed.response_mask
    ids = packed.response_ids[kept]
    sampled = logits.flatten(0, 1).index_select(0, _logit_places(kept))  # [sampled ids, V]
    log_probs, entropy = (_with_entropy if entropy_grad else chosen_log_probs)(sampled, ids, temperature)
    zeros = torch.zeros(kept.shape, dtype=torch.float32, device=log_probs.device)
    return TokenStats(zeros.masked_scatter(kept, log_probs), zeros.masked_scatter(kept, entropy))


def _logit_places(kept: Tensor) -> Tensor:
    """Where the logits of each kept id stand among N x (R + 1): the last position of a row belongs to no id."""
    row, column = kept.nonzero(as_tuple=True)
    return row * (kept.shape[1] + 1) + column


def _with_entropy(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    scaled = logits.float() / temperature
    log_norm = torch.logsumexp(scaled, -1)
    chosen = scaled.gather(-1, ids[:, None])[:, 0]
    return chosen - log_norm, log_norm - (torch.softmax(scaled, -1) * scaled).sum(-1)


def prefill_prefixes(model: Any, ids: Tensor, mask: Tensor, prefix_of: Tensor) -> tuple[Any, Tensor]:
    """Key-value cache of every row's prefix, and its [N, P] mask. Each distinct prefix is computed once.

    Args:
        ids: [U, P] left-padded prefixes.
        mask: [U, P] bool.
        prefix_of: [N] index of each row's prefix.
    """
    cache = prefill(model, ids, mask)
    if ids.shape[1]:
        cache.batch_select_indices(prefix_of)
    return cache, mask[prefix_of]


def prefill(model: Any, ids: Tensor, mask: Tensor) -> Any:
    """Key-value cache of [U, P] left-padded ids; an empty one where P is 0."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    if ids.shape[1]:
        model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return cache


def extend(model: Any, ids: Tensor, mask: Tensor, cache: Any, past_mask: Tensor, keep: int) -> Tensor:
    """[N, keep, V] logits of the last ``keep`` positions of ``ids`` after what ``cache`` holds.

    Positions count real ids only, so that padding anywhere changes nothing.
    """
    full = torch.cat([past_mask, mask], 1)
    positions = (full.cumsum(1) - 1).clamp(min=0)[:, past_mask.shape[1] :]
    out = model(
        input_ids=ids,
        attention_mask=full.long(),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
    )
    logits: Tensor = out.logits
    return logits
