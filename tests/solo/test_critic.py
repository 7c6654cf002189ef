"""The value model: values one position early, verl's clipped loss, float32 weights, one optimizer step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from poimen_exp.errors import Refused
from poimen_exp.solo.critic import Critic, ValueBatch, value_loss
from poimen_exp.solo.losses import MiniBatchSize
from poimen_exp.solo.rows import Row
from poimen_exp.solo.settings import CriticSettings

from .support import CPU, OPTIM, PAD, batch, row, some_rows

GROUPS = [0, 0, 0, 1, 1, 1]


def settings_for(folder: Path, **changes: Any) -> CriticSettings:
    base = CriticSettings(
        path=folder,
        lora_rank=0,
        dtype="float32",
        attn_implementation="sdpa",
        optim=replace(OPTIM, lr=1e-3),
        ppo_mini_batch_size=2,
        ppo_epochs=1,
        micro_batch_tokens=10_000,
        cliprange_value=0.5,
        loss_agg_mode="token-mean",
    )
    return replace(base, **changes)


def critic(folder: Path, **changes: Any) -> Critic:
    torch.manual_seed(3)
    return Critic(settings_for(folder, **changes), PAD, 2, CPU)


def plain_values(of: Critic, row: Row) -> Tensor:
    """[R] one forward of one row: the value at the position before each response token."""
    ids = torch.tensor([row.prompt.ids + row.response])
    return of.model(input_ids=ids).logits[0, len(row.prompt.ids) - 1 : -1, 0].float()


def targets(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(len(row.response), generator=generator) for row in some_rows())


def learnable() -> Any:
    return replace(batch(some_rows(), [0.0] * 6, GROUPS), returns=targets(1))


@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_values_are_those_of_one_row_at_a_time(tiny_folder: Path, budget: int) -> None:
    made = critic(tiny_folder, micro_batch_tokens=budget)
    with torch.no_grad():
        wanted = [plain_values(made, row) for row in some_rows()]
    for value, plain in zip(made.values(some_rows()), wanted, strict=True):
        assert torch.allclose(value, plain, atol=1e-5)
        assert plain.abs().max() > 1e-3


def test_a_micro_batch_holds_the_prompts_of_all_its_rows(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of one prompt of 40 ids and 10 sampled ones are 200 tokens to a critic, which shares nothing."""
    widths: list[int] = []
    made = critic(tiny_folder, micro_batch_tokens=100)
    plain = made._forward

    def counted(rows: Any) -> Any:
        widths.append(len(rows))
        return plain(rows)

    monkeypatch.setattr(made, "_forward", counted)
    made.values([row(range(10, 50), 39, range(60, 70)) for _ in range(4)])
    assert widths == [2, 2]


def test_every_weight_is_trained_in_float32_whatever_the_forwards_run_in(tiny_folder: Path) -> None:
    made = critic(tiny_folder, dtype="bfloat16")
    assert {value.dtype for value in made.model.parameters()} == {torch.float32}
    assert len(made.trainable()) == len(list(made.model.parameters()))
    # At rate 1e-6 a bfloat16 weight of 0.3 would not move.
    small = critic(tiny_folder, dtype="bfloat16", optim=replace(OPTIM, lr=1e-6))
    before = small.state()
    small.update(learnable(), targets(2))
    moved = [
        float((value != before[name]).float().mean()) for name, value in small.trainable().items() if value.dim() > 1
    ]
    assert min(share for share in moved[1:]) > 0.9  # all but the embedding, whose unread rows have no gradient


def test_a_lora_critic_trains_adapter_and_head_only(tiny_folder: Path) -> None:
    made = critic(tiny_folder, lora_rank=2, dtype="bfloat16")
    names = list(made.trainable())
    assert all("lora_" in name or "score" in name for name in names)
    assert any("score" in name for name in names)
    assert {value.dtype for value in made.trainable().values()} == {torch.float32}
    before, base = made.state(), made.model.base_model.model.model.embed_tokens.weight.clone()
    report = made.update(learnable(), made.values(some_rows()))
    assert report.taken == 1
    assert any(not torch.equal(value, before[name]) for name, value in made.trainable().items() if "score" in name)
    assert torch.equal(made.model.base_model.model.model.embed_tokens.weight, base)


def test_the_gradient_of_an_update_is_that_of_verls_loss_on_padded_tensors(tiny_folder: Path) -> None:
    """Half the mean over response tokens of the larger squared error, with verl's function, rows one by one."""
    from verl.trainer.ppo.core_algos import compute_value_loss

    made = critic(tiny_folder, micro_batch_tokens=30)
    old, items = targets(2), learnable()
    width = max(len(row.response) for row in items.rows)

    def pad(rows: Any) -> Tensor:
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])

    mask = pad([torch.ones(len(row.response)) for row in items.rows])
    predicted = pad([plain_values(made, row) for row in items.rows])
    loss, _ = compute_value_loss(predicted, pad(items.returns), pad(old), mask, 0.5)
    names, weights = zip(*made.trainable().items(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(loss, weights), strict=True))
    report = made.update(items, old)
    for name, value in made.trainable().items():
        assert value.grad is not None
        assert torch.allclose(value.grad, wanted[name], atol=1e-3 * float(wanted[name].abs().max()) + 1e-8), name
    assert report.metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_value_loss_is_verls_own_and_its_shares_add_up(tiny_folder: Path, mode: str) -> None:
    from verl.trainer.ppo.core_algos import compute_value_loss

    settings = settings_for(tiny_folder, loss_agg_mode=mode, loss_scale_factor=7)
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5)[None] < torch.tensor([5, 2, 3])[:, None]
    new, returns, old = (torch.randn(3, 5, generator=generator) * 2 * mask for _ in range(3))
    size = MiniBatchSize(tokens=10, rows=3)
    wanted, _ = compute_value_loss(
        new, returns, old, mask.float(), 0.5, mode, batch_num_tokens=10, global_batch_size=3, loss_scale_factor=7
    )
    whole, metrics = value_loss(ValueBatch(new, returns, old, mask), size, settings)
    assert whole.item() == pytest.approx(wanted.item(), abs=1e-6)
    parts = [
        value_loss(ValueBatch(new[rows], returns[rows], old[rows], mask[rows]), size, settings)
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert sum(part.item() for part, _ in parts) == pytest.approx(wanted.item(), abs=1e-6)
    for name, value in metrics.items():
        assert sum(part[name] for _, part in parts) == pytest.approx(value, abs=1e-6)


def test_an_update_brings_values_nearer_to_their_returns(tiny_folder: Path) -> None:
    made = critic(tiny_folder, cliprange_value=100.0)
    items = learnable()

    def error() -> float:
        pairs = zip(made.values(items.rows), items.returns, strict=True)
        return float(torch.cat([(value - target).square() for value, target in pairs]).mean())

    first = error()
    for _ in range(10):
        made.update(items, made.values(items.rows))
    assert error() < 0.5 * first


def test_epochs_and_mini_batches_are_the_critics_own(tiny_folder: Path) -> None:
    report = critic(tiny_folder, ppo_epochs=3, ppo_mini_batch_size=1).update(learnable(), targets(2))
    assert (report.taken, list(report.skipped)) == (6, [])


def test_metrics_are_means_over_optimizer_steps(tiny_folder: Path) -> None:
    made = critic(tiny_folder, ppo_mini_batch_size=1, optim=replace(OPTIM, lr=0.0))
    rows, returns, old = some_rows(), targets(1), targets(2)
    alone = [
        made.update(replace(batch(rows[part], [0.0] * 3, [0] * 3), returns=returns[part]), old[part]).metrics
        for part in (slice(0, 3), slice(3, 6))
    ]
    both = made.update(learnable(), old).metrics
    for name in ("critic/vf_loss", "critic/vpred_mean", "critic/grad_norm"):
        assert abs(alone[0][name] - alone[1][name]) > 1e-3
        assert both[name] == pytest.approx((alone[0][name] + alone[1][name]) / 2, rel=1e-3)


def test_the_gradient_is_clipped_to_its_norm(tiny_folder: Path) -> None:
    made = critic(tiny_folder, optim=replace(OPTIM, grad_clip=1e-3))
    report = made.update(learnable(), targets(2))
    squares = [value.grad.square().sum() for value in made.trainable().values() if value.grad is not None]
    assert float(torch.stack(squares).sum().sqrt()) == pytest.approx(1e-3, rel=1e-3)
    assert report.metrics["critic/grad_norm"] > 1e-2  # before clipping


def test_weights_decay_by_rate_and_decay_alone_where_nothing_is_learnt(tiny_folder: Path) -> None:
    made = critic(tiny_folder, optim=replace(OPTIM, lr=0.1, weight_decay=0.5))
    before, now = made.state(), made.values(some_rows())
    # Right values beside old ones ten above: the clipped value, 9.5 off, is the larger error and has no gradient.
    made.update(replace(learnable(), returns=now), tuple(value + 10.0 for value in now))
    for name, value in made.state().items():
        assert torch.allclose(value, 0.95 * before[name], rtol=1e-6, atol=0)


def test_a_return_that_is_no_number_is_named_and_the_weights_stay(tiny_folder: Path) -> None:
    made = critic(tiny_folder)
    before = made.state()
    wrong = replace(learnable(), returns=(torch.full((3,), torch.nan), *targets(1)[1:]))
    report = made.update(wrong, targets(2))
    assert report.taken == 0
    assert report.skipped == ["critic: loss nan over row 0 ... row 5"]
    assert all(torch.equal(value, before[name]) for name, value in made.trainable().items())


def test_weights_of_another_critic_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(Refused, match="critic weights do not fit"):
        critic(tiny_folder).load_state(critic(tiny_folder, lora_rank=2).state())
