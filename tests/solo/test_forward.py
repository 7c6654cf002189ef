"""Log-probs and gradients of packed rows equal those of one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from poimen_exp.solo.forward import token_stats
from poimen_exp.solo.rows import micro_batches, pack
from poimen_exp.solo.slots import grouped_attention, never_attend_with_cudnn

from .support import CPU, PAD, TEMPERATURE, plain_log_probs, policy, some_rows


def test_log_probs_equal_the_unpadded_ones(tiny_model: Any) -> None:
    rows = some_rows()
    packed = pack(rows, PAD, CPU)
    with torch.no_grad():
        stats = token_stats(tiny_model, packed, TEMPERATURE)
        for place, item in enumerate(rows):
            got = stats.log_probs[place][packed.response_mask[place]]
            assert torch.allclose(got, plain_log_probs(tiny_model, item), rtol=0, atol=1e-5)
    assert stats.log_probs.shape == (6, 6)
    assert not stats.log_probs[~packed.response_mask].any()
    assert not stats.entropy[~packed.response_mask].any()


def test_the_entropy_is_that_of_the_sampling_temperature(tiny_model: Any) -> None:
    item = some_rows()[0]
    with torch.no_grad():
        stats = token_stats(tiny_model, pack([item], PAD, CPU), TEMPERATURE)
        ids = torch.tensor([item.prompt.ids + item.response])
        logits = tiny_model(input_ids=ids).logits[0, len(item.prompt.ids) - 1 : -1] / TEMPERATURE
    assert torch.allclose(stats.entropy[0], torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5)


def test_gradients_equal_the_unpadded_ones_through_shared_prefixes(tiny_model: Any) -> None:
    rows = some_rows()
    weights = torch.linspace(-1, 1, 18)
    parameters = [value for value in tiny_model.parameters() if value.requires_grad]
    packed = pack(rows, PAD, CPU)
    got_sum = (token_stats(tiny_model, packed, TEMPERATURE).log_probs[packed.response_mask] * weights).sum()
    got = torch.autograd.grad(got_sum, parameters)
    plain_sum = (torch.cat([plain_log_probs(tiny_model, item) for item in rows]) * weights).sum()
    plain = torch.autograd.grad(plain_sum, parameters)
    for mine, wanted in zip(got, plain, strict=True):
        assert torch.allclose(mine, wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()) + 1e-6)


@pytest.mark.parametrize("budget", [1, 12, 25, 60, 1000])
def test_the_micro_batch_budget_changes_no_log_prob(tiny_model: Any, budget: int) -> None:
    rows = some_rows()
    seen = 0
    with torch.no_grad():
        for places in micro_batches(rows, range(len(rows)), budget):
            packed = pack([rows[place] for place in places], PAD, CPU)
            stats = token_stats(tiny_model, packed, TEMPERATURE)
            for line, place in enumerate(places):
                got = stats.log_probs[line][packed.response_mask[line]]
                assert torch.allclose(got, plain_log_probs(tiny_model, rows[place]), rtol=0, atol=1e-5)
                seen += 1
    assert seen == len(rows)


def test_no_policy_attends_with_cudnn(tiny_folder: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    policy(tiny_folder)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
def test_padded_rows_have_finite_gradients_at_every_length(require: Callable[[str, str | None], None]) -> None:
    require("gpu", None if torch.cuda.is_available() else "torch sees none")
    never_attend_with_cudnn()
    for keys in (64, 640, 704, 705, 768):  # cuDNN 9.19 gave NaN at 704
        query, key, value = (
            torch.randn(2, heads, keys, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (9, 3, 3)
        )
        mask = torch.ones(keys, keys, dtype=torch.bool, device="cuda").tril().repeat(2, 1, 1, 1)
        mask[0, :, :, : keys // 2] = False  # the shorter row: its padding sees nothing at all
        grouped_attention(torch.nn.Module(), query, key, value, mask)[0][:, keys // 2 :].sum().backward()
        assert all(bool(torch.isfinite(item.grad).all()) for item in (query, key, value) if item.grad is not None), keys
