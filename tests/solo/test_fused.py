"""Fused layers against the plain ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from poimen_exp.config.paths import asset
from poimen_exp.solo import fused
from poimen_exp.solo.policy import ADAPTER, Policy
from poimen_exp.solo.settings import ModelSettings

from .support import CPU


def peft_layer(bias: bool, dtype: torch.dtype) -> Any:
    """A LoRA layer of rank 3 and scaling 2 over 5 -> 4, with a B that is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4, bias=bias)).to(dtype).requires_grad_(False)
    model = get_peft_model(net, LoraConfig(r=3, lora_alpha=6, target_modules=["0"])).eval()  # type: ignore[arg-type]
    for value in model.parameters():
        if value.requires_grad:
            value.data = torch.randn_like(value, dtype=torch.float32)
    return model


def gradients(model: Any, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of x, A and B, of a weighted sum of the output."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = model(x)
    (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    trained = [value for value in model.parameters() if value.requires_grad]
    return [out.detach().float(), x.grad.float(), *(value.grad for value in trained)]  # type: ignore[union-attr, list-item]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=["float32", "bfloat16"]
)
def test_a_fused_lora_layer_is_pefts_with_its_gradients(bias: bool, dtype: torch.dtype, near: float) -> None:
    plain = peft_layer(bias, dtype)
    other = copy.deepcopy(plain)
    fused.use_fused_lora(other, ADAPTER)
    x = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    for mine, wanted in zip(gradients(other, x, dtype), gradients(plain, x, dtype), strict=True):
        assert torch.allclose(mine, wanted, rtol=near, atol=near * float(wanted.abs().max()))


def test_an_input_without_gradient_is_given_none() -> None:
    model = peft_layer(True, torch.float32)
    fused.use_fused_lora(model, ADAPTER)
    model(torch.ones(3, 5)).sum().backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)


def test_fused_norms_are_transformers_own() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    net = torch.nn.Sequential(Qwen2RMSNorm(16, eps=1e-2), GemmaRMSNorm(16))
    net[0].weight.data = torch.linspace(0.5, 2, 16)
    plain, gemma = copy.deepcopy(net[0]), type(net[1])
    fused.use_fused_norms(net)
    assert type(net[0]) is not Qwen2RMSNorm
    assert type(net[1]) is gemma  # it scales by 1 + weight
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)) / 10
    assert torch.allclose(net[0](x), plain(x), rtol=1e-6, atol=1e-7)
    assert torch.allclose(copy.deepcopy(net)[0](x), plain(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("chunk", [2**28, 25])
def test_chosen_log_probs_are_autograds_bit_for_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_CHUNK", chunk)
    source = torch.Generator().manual_seed(0)
    logits = (torch.randn(7, 11, generator=source) * 4).requires_grad_()
    ids = torch.randint(11, (7,), generator=source)
    weights = torch.randn(7, generator=source)
    got, entropy = fused.chosen_log_probs(logits, ids, 0.7)
    grad = torch.autograd.grad((got * weights).sum(), logits)[0]
    scaled = logits.float() / 0.7
    norm = torch.logsumexp(scaled, -1)
    wanted = scaled.gather(-1, ids[:, None])[:, 0] - norm
    assert torch.equal(got, wanted)
    assert torch.equal(grad, torch.autograd.grad((wanted * weights).sum(), logits)[0])
    assert not entropy.requires_grad
    assert torch.allclose(entropy, torch.distributions.Categorical(logits=scaled).entropy(), atol=1e-5)


def test_bfloat16_policies_are_fused_and_float32_ones_are_pefts() -> None:
    model = Path(asset("quickstart/model"))
    for dtype, wanted in (("bfloat16", True), ("float32", False)):
        policy = Policy(ModelSettings(model, 4, 8, "all-linear", dtype, "sdpa", None), CPU)  # type: ignore[arg-type]
        layer = policy.model.base_model.model.model.layers[0]
        assert (layer.mlp.up_proj.forward.__class__.__name__ == "partial") is wanted
        assert ("hidden_states" in layer.input_layernorm.forward.__code__.co_varnames) is True
        assert (layer.input_layernorm.forward.__func__.__module__ == fused.__name__) is wanted
