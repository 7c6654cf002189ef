"""verl's log-probs of a packed batch in one pass, where flash-attn is missing.

Without flash-attn verl 0.9.1 goes through a packed batch one token at a time, in Python
(``torch_functional.logprobs_from_logits_v2``): on one H200 that was most of an update's time.
"""

from __future__ import annotations

from torch import Tensor

from poimen_exp.solo.fused import chosen_log_probs


def use_log_probs_in_one_pass() -> None:
    """Gives verl's FSDP engine ``log_probs_of`` for its own function of that name, in this process."""
    from verl.utils import torch_functional
    from verl.workers.engine.fsdp import transformer_impl

    if not torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        transformer_impl.logprobs_from_logits = log_probs_of


def log_probs_of(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:  # noqa: ARG001
    """verl's ``logprobs_from_logits``: [...] float32 log-prob of each label under the softmax of [..., V] logits."""
    flat, _ = chosen_log_probs(logits.flatten(0, -2), labels.flatten(), 1.0)
    return flat.view(labels.shape)
