"""The actor objective is verl's, and does not depend on how rows are cut or padded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from poimen_exp.solo.losses import LossBatch, MiniBatchSize, actor_loss, finite, summed
from poimen_exp.solo.settings import LossSettings

from .support import LOSS

KL = replace(LOSS, use_kl_loss=True, kl_loss_coef=0.3)
ENTROPY = replace(LOSS, entropy_coeff=0.2)
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def loss_batch(lengths: list[int], advantages: list[float], seed: int = 0) -> LossBatch:
    """Rows of these lengths with random log-probs, old and reference ones."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]

    def some(scale: float) -> Tensor:
        return torch.randn(mask.shape, generator=generator) * scale * mask

    new = (some(0.5) - 1) * mask
    return LossBatch(
        log_probs=new.requires_grad_(),
        entropy=some(1.0).abs().requires_grad_(),
        old_log_probs=new.detach() + some(0.4),
        ref_log_probs=new.detach() + some(0.4),
        advantages=torch.tensor(advantages)[:, None] * mask,
        mask=mask,
    )


def part(batch: LossBatch, rows: slice, width: int) -> LossBatch:
    """Some rows, cut to or filled up to ``width``."""

    def cut(values: Tensor) -> Tensor:
        missing = max(0, width - values.shape[1])
        return torch.nn.functional.pad(values[rows, :width], (0, missing))

    assert batch.ref_log_probs is not None
    return LossBatch(
        cut(batch.log_probs),
        cut(batch.entropy),
        cut(batch.old_log_probs),
        cut(batch.ref_log_probs),
        cut(batch.advantages),
        cut(batch.mask),
    )


def even(lengths: list[int], advantages: list[float]) -> LossBatch:
    """A fresh policy: old log-probs are the new ones."""
    batch = loss_batch(lengths, advantages)
    return replace(batch, old_log_probs=batch.log_probs.detach())


def test_the_denominator_is_the_tokens_of_the_mini_batch() -> None:
    # 10 tokens at 1 and 30 at 0: (10 x 1 + 30 x 0) / 40; a mean of row means would be 0.5.
    size = MiniBatchSize(tokens=40, rows=2)
    assert actor_loss(even([10, 30], [1.0, 0.0]), size, LOSS)[0].item() == pytest.approx(-0.25, abs=1e-6)


def test_a_gradient_step_raises_what_was_better_than_its_group() -> None:
    batch = even([2, 3], [1.0, -1.0])
    actor_loss(batch, MiniBatchSize(5, 2), LOSS)[0].backward()  # type: ignore[no-untyped-call]
    assert batch.log_probs.grad is not None
    # d loss / d log-prob = -advantage / 5 on real tokens, 0 on padding.
    assert torch.allclose(batch.log_probs.grad, torch.tensor([[-0.2, -0.2, 0.0], [0.2, 0.2, 0.2]]), atol=1e-6)


def test_ratios_are_clipped_on_the_side_that_the_advantage_pushes() -> None:
    """Ratios e (above 1.2) and 1/e (below 0.8), advantages +1 and -1: clipped where the gain would grow further."""
    new = torch.zeros(4, 1, requires_grad=True)
    old = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])
    for place, advantage, expected in ((0, 1.0, -1.2), (1, 1.0, -0.367879), (2, -1.0, 2.718282), (3, -1.0, 0.8)):
        one = slice(place, place + 1)
        batch = LossBatch(
            new[one], torch.zeros(1, 1), old[one], None, torch.tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool)
        )
        loss, metrics = actor_loss(batch, MiniBatchSize(1, 1), LOSS)
        assert loss.item() == pytest.approx(expected, abs=1e-5)
        assert metrics["actor/pg_clipfrac"] == float(place in (0, 3))


def test_the_dual_clip_bounds_a_punished_ratio() -> None:
    batch = even([1], [-1.0])
    batch = replace(batch, old_log_probs=batch.log_probs.detach() - 2.0)
    loss, metrics = actor_loss(batch, MiniBatchSize(1, 1), LOSS)
    assert loss.item() == pytest.approx(3.0, abs=1e-5)  # e^2 would be 7.39
    assert metrics["actor/pg_clipfrac_lower"] == 1.0


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "expected"),
    [
        (-1.0, -1.0, 0.9),  # 1/e
        (1.0, 1.0, -1.3),  # e
        (-1.0, 1.0, 2.0),  # e, punished
    ],
)
def test_every_bound_is_its_own_setting(advantage: float, log_ratio: float, expected: float) -> None:
    settings = replace(LOSS, clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0)
    batch = even([1], [advantage])
    batch = replace(batch, old_log_probs=batch.log_probs.detach() - log_ratio)
    assert actor_loss(batch, MiniBatchSize(1, 1), settings)[0].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "loss", [LOSS, KL, ENTROPY, replace(KL, entropy_coeff=0.1)], ids=["pg", "kl", "entropy", "all"]
)
def test_shares_of_micro_batches_add_up_to_the_whole(mode: str, loss: LossSettings) -> None:
    loss = replace(loss, loss_agg_mode=mode)
    lengths, advantages = [3, 7, 1, 4], [1.0, -0.5, 0.25, -1.0]
    size = MiniBatchSize(sum(lengths), len(lengths))
    whole = loss_batch(lengths, advantages)
    wanted, wanted_metrics = actor_loss(whole, size, loss)
    (wanted_gradient,) = torch.autograd.grad(wanted, whole.log_probs, retain_graph=True)
    parts = [actor_loss(part(whole, rows, width), size, loss) for rows, width in ((slice(0, 1), 3), (slice(1, 4), 9))]
    total = sum((value for value, _ in parts), torch.zeros(()))
    assert total.item() == pytest.approx(wanted.item(), abs=1e-6)
    (gradient,) = torch.autograd.grad(total, whole.log_probs)
    assert torch.allclose(gradient, wanted_gradient, atol=1e-7)
    assert summed(metrics for _, metrics in parts) == pytest.approx(wanted_metrics, abs=1e-6)


def verl_loss(batch: LossBatch, size: MiniBatchSize, loss: LossSettings) -> tuple[Tensor, dict[str, Any]]:
    """verl's own ``ppo_loss`` on the same rows, after prompts of two tokens."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    from poimen_exp.solo.losses import actor_config

    count, width = batch.mask.shape
    prompts = torch.ones(count, 2, dtype=torch.int64)
    flat = []  # verl's model output: one value a position, that of the next token
    for values in (batch.log_probs, batch.entropy):
        rows = [
            torch.cat([torch.zeros(1), row[kept], torch.zeros(1)]) for row, kept in zip(values, batch.mask, strict=True)
        ]
        flat.append(torch.cat(rows))
    tensors = {
        "prompts": prompts,
        "responses": torch.ones(count, width, dtype=torch.int64),
        "attention_mask": torch.cat([torch.ones(count, 2, dtype=torch.int64), batch.mask.long()], 1),
        "response_mask": batch.mask.long(),
        "old_log_probs": batch.old_log_probs,
        "advantages": batch.advantages,
        "ref_log_prob": batch.ref_log_probs,
    }
    sizes = {"dp_size": 1, "batch_num_tokens": size.tokens, "global_batch_size": size.rows}
    data = tu.get_tensordict(tensors, non_tensor_dict=sizes)
    config = actor_config(replace(loss, clip_ratio_c=loss.clip_ratio_c))
    value, metrics = ppo_loss(config, {"log_probs": flat[0], "entropy": flat[1]}, data)
    return value, metrics


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", [LOSS, KL, ENTROPY, replace(KL, kl_loss_type="k1")], ids=["pg", "kl", "entropy", "k1"])
def test_the_loss_is_verls_own_ppo_loss(mode: str, loss: LossSettings) -> None:
    loss = replace(loss, loss_agg_mode=mode)
    batch = loss_batch([3, 7, 1, 4], [1.0, -0.5, 0.25, -1.0], seed=3)
    size = MiniBatchSize(tokens=15, rows=4)
    wanted = verl_loss(batch, size, loss)[0]
    (wanted_gradient,) = torch.autograd.grad(wanted, batch.log_probs)
    mine = actor_loss(batch, size, loss)[0]
    (gradient,) = torch.autograd.grad(mine, batch.log_probs)
    assert mine.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert torch.allclose(gradient, wanted_gradient, atol=1e-7)
    assert wanted.item() != 0


def test_the_scale_factor_divides_what_rows_sum_to() -> None:
    # (2 x 1 + 3 x 0.5) / 2 rows / 7; the width of the forward, 3 or 2, would divide otherwise.
    settings = replace(LOSS, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=7)
    batch, size = even([2, 3], [1.0, 0.5]), MiniBatchSize(5, 2)
    assert actor_loss(batch, size, settings)[0].item() == pytest.approx(-0.25, abs=1e-6)
    shares = [actor_loss(part(batch, slice(place, place + 1), 2 + place), size, settings)[0] for place in (0, 1)]
    assert [share.item() for share in shares] == pytest.approx([-1 / 7, -0.75 / 7], abs=1e-6)


def test_finite_says_whether_every_entry_is_a_number() -> None:
    assert finite(torch.tensor([1.0, -2.0]))
    assert not finite(torch.tensor([1.0, torch.nan]))
    assert not finite(float("inf"))
