"""The same arithmetic with fewer passes over memory: LoRA layers, norms, and log-probs of a large vocabulary.

A small model's update is bound by memory traffic: peft casts every layer's input to the adapter's float32 and back,
and adds the adapter's product in passes of its own; transformers' norm takes seven.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""weight * x / rms(x), by name: other models' norms scale by 1 + weight."""
_CHUNK = 2**28
"""Logits worked on at a time: 1 GB in float32."""


def use_fused_norms(model: torch.nn.Module) -> None:
    """Norms in one kernel: float32 inside, rounded once where transformers rounds twice."""
    for module in model.modules():
        if type(module).__name__ in _NORMS:
            module.__class__ = _fused_norm(type(module))


def _fused_norm(norm: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight: Tensor = self.weight
        return torch.nn.functional.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)

    return type(norm.__name__, (norm,), {"forward": forward})


def use_fused_lora(model: torch.nn.Module, adapter: str) -> None:
    """LoRA layers over linear ones compute ``x W^T + b + scaling x A^T B^T`` without copies of ``x`` or of the sum.

    Only for models without dropout, of one adapter, whose base is not float32: there nothing is cast.
    """
    from peft.tuners.lora import Linear

    for module in model.modules():
        if isinstance(module, Linear) and type(module.get_base_layer()) is torch.nn.Linear:
            module.forward = partial(_lora_forward, module, adapter)


def _lora_forward(module: Any, adapter: str, x: Tensor) -> Tensor:
    base, a, b = module.get_base_layer(), module.lora_A[adapter].weight, module.lora_B[adapter].weight
    out: Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
        x, base.weight, base.bias, a.to(x.dtype), b.to(x.dtype), float(module.scaling[adapter])
    )
    return out


class _LoraLinear(torch.autograd.Function):
    """[..., O] of x [..., I], frozen weight [O, I] and bias [O], A [r, I], B [O, r]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        out = torch.nn.functional.linear(x, weight, bias)
        low = torch.nn.functional.linear(x, a).flatten(0, -2)
        out.view(-1, out.shape[-1]).addmm_(low, b.T, alpha=scaling)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        grad_low = flat @ b * ctx.scaling
        grad_a = grad_low.T @ x.flatten(0, -2)
        grad_b = flat.T @ low * ctx.scaling
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (flat @ weight).addmm_(grad_low, a).view_as(x)
        return grad_x, None, None, grad_a, grad_b, None


def chosen_log_probs(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[M] log-prob of each id under ``softmax(logits / temperature)``, and [M] entropies without gradient.

    Of the logits [M, V], for the backward pass, only what they are is kept, in their own type.
    """
    log_probs, entropy = _ChosenLogProbs.apply(logits, ids, temperature)  # type: ignore[no-untyped-call]
    return log_probs, entropy


class _ChosenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        norms, chosen, expected = [], [], []
        size = max(1, _CHUNK // logits.shape[-1])
        for part, part_ids in zip(logits.split(size), ids.split(size), strict=True):  # type: ignore[no-untyped-call]
            scaled = part.float() / temperature
            norms.append(torch.logsumexp(scaled, -1))
            chosen.append(scaled.gather(-1, part_ids[:, None])[:, 0])
            expected.append((torch.softmax(scaled, -1) * scaled).sum(-1))
        norm = torch.cat(norms)
        ctx.save_for_backward(logits, ids, norm)
        ctx.temperature = temperature
        entropy = norm - torch.cat(expected)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(chosen) - norm, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, norm = ctx.saved_tensors
        out, size = torch.empty_like(logits), max(1, _CHUNK // logits.shape[-1])
        pieces = (value.split(size) for value in (out, logits, ids, norm, grad))
        for into, part, part_ids, part_norm, part_grad in zip(*pieces, strict=True):
            share = torch.exp(part.float() / ctx.temperature - part_norm[:, None]) * -part_grad[:, None]
            share.scatter_add_(-1, part_ids[:, None], part_grad[:, None])
            into.copy_(share / ctx.temperature)
        return out, None, None
