"""One step's updates of a real LoRA policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from poimen_exp.errors import Refused
from poimen_exp.solo.policy import Policy
from poimen_exp.solo.settings import StepSettings
from poimen_exp.solo.update import Updater, joined, mini_batches, role_report

from .support import LOSS, OPTIM, STEP, batch, plain_log_probs, policy, row, some_batch, some_rows, updater

TWO_MINIS = replace(STEP, ppo_mini_batch_size=1)


@pytest.fixture
def tiny_policy(tiny_folder: Path) -> Policy:
    return policy(tiny_folder)


def gradients(of: Policy) -> dict[str, Tensor]:
    return {name: value.grad.clone() for name, value in of.trainable().items() if value.grad is not None}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_role_that_takes_no_step_stalls_whatever_the_other_takes() -> None:
    critic, actor = role_report({}, 2, ["nan"]), role_report({}, 0, ["nan", "nan"])
    both = joined([critic, actor])
    assert (both.taken, len(both.skipped), both.stalled) == (2, 3, 2)
    assert joined([critic, role_report({}, 1, [])]).stalled == 0


def test_the_gradient_is_that_of_the_advantages_over_all_tokens(tiny_policy: Policy) -> None:
    items = some_batch()
    tokens = sum(len(item.response) for item in items.rows)
    objective = torch.zeros(())
    for item, advantage in zip(items.rows, items.advantages, strict=True):
        objective = objective - (advantage * plain_log_probs(tiny_policy.model, item)).sum() / tokens
    names = list(tiny_policy.trainable())
    wanted = torch.autograd.grad(objective, list(tiny_policy.trainable().values()))
    report = updater(tiny_policy).update(items)
    found = gradients(tiny_policy)
    for name, value in zip(names, wanted, strict=True):
        assert torch.allclose(found[name], value, rtol=0, atol=1e-3 * float(value.abs().max()))
    assert report.taken == 1
    total = torch.sqrt(sum((value.square().sum() for value in wanted), torch.zeros(())))
    assert report.metrics["actor/grad_norm"] == pytest.approx(float(total), rel=1e-3)


@pytest.mark.parametrize("budget", [1, 20, 40])
def test_the_micro_batch_budget_changes_neither_gradient_nor_metrics(tiny_folder: Path, budget: int) -> None:
    whole, cut = policy(tiny_folder), policy(tiny_folder)
    wanted = updater(whole).update(some_batch())
    found = updater(cut, step=replace(STEP, micro_batch_tokens=budget)).update(some_batch())
    for name, value in gradients(whole).items():
        assert torch.allclose(gradients(cut)[name], value, rtol=0, atol=1e-3 * float(value.abs().max()))
    assert dict(found.metrics) == pytest.approx(dict(wanted.metrics), abs=1e-5)


@pytest.mark.parametrize("step", [STEP, TWO_MINIS, replace(TWO_MINIS, ppo_epochs=3)], ids=["one", "two", "six"])
def test_at_lr_0_the_ratio_is_1_and_nothing_is_clipped(tiny_policy: Policy, step: StepSettings) -> None:
    before = tiny_policy.state()
    report = updater(tiny_policy, optim=replace(OPTIM, lr=0.0), step=step).update(some_batch())
    assert same(tiny_policy.state(), before)
    for name in ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        assert report.metrics[name] == pytest.approx(0.0, abs=1e-6)
    assert report.metrics["actor/grad_norm"] > 0


def test_later_mini_batches_see_the_old_policy(tiny_policy: Policy) -> None:
    """Old log-probs come from before the first optimizer step: after it the ratio is no longer 1."""
    report = updater(tiny_policy, step=TWO_MINIS).update(some_batch())
    assert report.taken == 2
    assert abs(report.metrics["actor/ppo_kl"]) > 1e-4


def test_a_step_moves_the_probabilities_its_advantages_ask_for(tiny_policy: Policy) -> None:
    items = batch(some_rows()[:1] + some_rows()[3:4], [1.0, -1.0], [0, 1])

    def total(place: int) -> float:
        with torch.no_grad():
            return float(plain_log_probs(tiny_policy.model, items.rows[place]).sum())

    before = total(0), total(1)
    updater(tiny_policy).update(items)
    assert total(0) > before[0]
    assert total(1) < before[1]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize(("step", "expected"), [(STEP, 1), (TWO_MINIS, 2), (replace(TWO_MINIS, ppo_epochs=2), 4)])
def test_optimizer_steps_do_not_depend_on_how_many_turns_were_played(
    tiny_policy: Policy, turns: int, step: StepSettings, expected: int
) -> None:
    rows = [row([10, 11, place], 2, [30, 2]) for place in range(2 * turns)]
    items = batch(rows, [1.0, -1.0] * turns, [0] * turns + [1] * turns)
    assert updater(tiny_policy, step=step).update(items).taken == expected


def test_mini_batches_are_whole_groups() -> None:
    group = torch.tensor([2, 0, 1, 0, 2, 3, 0])
    assert mini_batches(group, 4, 2) == [[1, 3, 6, 2], [0, 4, 5]]
    assert mini_batches(group, 4, 4) == [[1, 3, 6, 2, 0, 4, 5]]
    # Group 1 failed altogether: its mini-batch is smaller, the others are what they were.
    assert mini_batches(torch.tensor([0, 2, 3]), 4, 2) == [[0], [1, 2]]


def test_a_nan_advantage_is_named_its_step_skipped_and_the_weights_stay(tiny_policy: Policy) -> None:
    items = batch(some_rows(), [1.0, float("nan"), 0.25, 0.5, -0.5, -0.25], [0, 0, 0, 1, 1, 1])
    before = tiny_policy.state()
    made = updater(tiny_policy)
    report = made.update(items)
    assert report.skipped == ["advantage nan of row 1"]
    assert report.taken == 0
    assert same(tiny_policy.state(), before)
    assert not gradients(tiny_policy)
    assert not made.optimizer.state
    assert "actor/grad_norm" not in report.metrics


def test_only_the_mini_batch_with_the_nan_is_skipped(tiny_policy: Policy) -> None:
    items = batch(some_rows(), [1.0, -1.0, 0.25, float("inf"), -0.5, -0.25], [0, 0, 0, 1, 1, 1])
    report = updater(tiny_policy, step=TWO_MINIS).update(items)
    assert report.skipped == ["advantage inf of row 3"]
    assert report.taken == 1
    assert all(torch.isfinite(value).all() for value in tiny_policy.state().values())


def test_a_gradient_that_is_no_number_is_named_and_skipped(tiny_policy: Policy) -> None:
    before = tiny_policy.state()
    first = next(iter(tiny_policy.trainable().values()))
    first.register_hook(lambda gradient: gradient * torch.nan)
    report = updater(tiny_policy).update(some_batch())
    assert report.skipped == ["gradient norm nan over row 0 ... row 5"]
    assert same(tiny_policy.state(), before)
    assert not gradients(tiny_policy)


def test_the_gradient_is_clipped_to_its_norm(tiny_policy: Policy) -> None:
    report = updater(tiny_policy, optim=replace(OPTIM, grad_clip=1e-3)).update(some_batch())
    norm = torch.sqrt(sum((value.square().sum() for value in gradients(tiny_policy).values()), torch.zeros(())))
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)
    assert report.metrics["actor/grad_norm"] > 1e-2  # before clipping


def test_the_norm_of_a_step_is_the_mean_over_its_optimizer_steps(tiny_policy: Policy) -> None:
    frozen = replace(OPTIM, lr=0.0)
    rows, advantages = some_rows(), [1.0, -1.0, 0.25, 0.1, -0.1, -0.05]
    alone = replace(STEP, train_batch_size=1, ppo_mini_batch_size=1)
    parts = [batch(rows[place : place + 3], advantages[place : place + 3], [0] * 3) for place in (0, 3)]
    first, second = (
        updater(tiny_policy, optim=frozen, step=alone).update(items).metrics["actor/grad_norm"] for items in parts
    )
    both = updater(tiny_policy, optim=frozen, step=TWO_MINIS).update(batch(rows, advantages, [0, 0, 0, 1, 1, 1]))
    assert abs(first - second) > 0.1 * first
    assert both.metrics["actor/grad_norm"] == pytest.approx((first + second) / 2, rel=1e-3)


def test_the_entropy_bonus_makes_the_policy_less_sure(tiny_policy: Policy) -> None:
    """Without advantages nothing else has a gradient."""
    still = batch(some_rows(), [0.0] * 6, [0, 0, 0, 1, 1, 1])
    made = updater(tiny_policy, loss=replace(LOSS, entropy_coeff=1.0), optim=replace(OPTIM, lr=1e-3))
    found = [made.update(still).metrics["actor/entropy"] for _ in range(5)]
    assert found == sorted(found)
    assert found[-1] > found[0] + 1e-3


def test_the_kl_loss_is_zero_at_the_reference_and_pulls_back_to_it(tiny_policy: Policy) -> None:
    loss = replace(LOSS, use_kl_loss=True, kl_loss_coef=1.0)
    reference = tiny_policy.state()
    still = batch(some_rows(), [0.0] * 6, [0, 0, 0, 1, 1, 1])
    made = updater(tiny_policy, loss=loss, optim=replace(OPTIM, lr=1e-3))
    assert made.update(still).metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for value in tiny_policy.trainable().values():
            value.add_(0.05)
    away = tiny_policy.state()
    first = made.update(still).metrics["actor/kl_loss"]
    assert not same(tiny_policy.state(), away)  # the reference was put in for its forward only
    for _ in range(20):
        last = made.update(still).metrics["actor/kl_loss"]
    assert 0 < last < first
    assert reference.keys() == away.keys()


def test_sampler_and_trainer_are_compared_by_probability(tiny_policy: Policy) -> None:
    """Rows whose recorded log-probs are the trainer's, but for one id recorded at half its probability."""
    with torch.no_grad():
        exact = [plain_log_probs(tiny_policy.model, item).tolist() for item in some_rows()]
    wrong = exact[3][0] - torch.log(torch.tensor(2.0)).item()
    rows = [row(r.prompt.ids, r.prompt.shared, r.response, lp) for r, lp in zip(some_rows(), exact, strict=True)]
    rows[3] = row(rows[3].prompt.ids, 2, rows[3].response, [wrong])
    gap = torch.tensor(exact[3][0]).exp().item() / 2
    for step in (STEP, TWO_MINIS):
        items = batch(rows, [0.0] * 6, [0, 0, 0, 1, 1, 1])
        metrics = updater(tiny_policy, optim=replace(OPTIM, lr=0.0), step=step).update(items).metrics
        assert metrics["training/rollout_probs_diff_max"] == pytest.approx(gap, abs=1e-5)
        assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(gap / 18, abs=1e-5)


def test_warm_up_starts_at_rate_zero_and_counts_rollout_batches(tiny_policy: Policy) -> None:
    made = updater(tiny_policy, optim=replace(OPTIM, lr_warmup_steps=4), step=TWO_MINIS)
    before = tiny_policy.state()
    rates = [made.update(some_batch()).metrics["actor/lr"]]
    assert same(tiny_policy.state(), before)
    rates += [made.update(some_batch()).metrics["actor/lr"] for _ in range(4)]
    # The rate that the next batch will have, as verl logs it.
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01], abs=1e-9)


def test_weights_decay_by_rate_and_decay_alone_where_nothing_is_learnt(tiny_policy: Policy) -> None:
    before = tiny_policy.state()
    still = batch(some_rows(), [0.0] * 6, [0, 0, 0, 1, 1, 1])
    updater(tiny_policy, optim=replace(OPTIM, lr=0.1, weight_decay=0.5)).update(still)
    for name, value in tiny_policy.state().items():
        assert torch.allclose(value, 0.95 * before[name], rtol=1e-6, atol=0)


def test_a_cosine_ends_at_its_least_rate(tiny_policy: Policy) -> None:
    optim = replace(OPTIM, lr_scheduler_type="cosine", min_lr_ratio=0.2, total_training_steps=4)
    made = updater(tiny_policy, optim=optim)
    rates = [made.update(batch([], [], [])).metrics["actor/lr"] for _ in range(4)]
    # 0.6 + 0.4 cos(pi t / 4), of 0.01.
    assert rates == pytest.approx([0.00882843, 0.006, 0.00317157, 0.002], abs=1e-8)


def test_an_unknown_schedule_is_refused_by_name(tiny_policy: Policy) -> None:
    with pytest.raises(Refused, match="lr_scheduler_type: got 'linear'"):
        updater(tiny_policy, optim=replace(OPTIM, lr_scheduler_type="linear"))  # type: ignore[arg-type]


def test_a_batch_all_of_whose_rollouts_failed_takes_no_step(tiny_policy: Policy) -> None:
    before = tiny_policy.state()
    report = updater(tiny_policy).update(batch([], [], []))
    assert (report.taken, list(report.skipped)) == (0, [])
    assert same(tiny_policy.state(), before)


def test_the_sampler_agrees_with_the_trainer_after_a_sync_and_differs_from_the_base(tiny_policy: Policy) -> None:
    item = some_rows()[2]
    made: Updater = updater(tiny_policy)
    with torch.no_grad():
        stale = plain_log_probs(tiny_policy.sampler, item)
    made.update(some_batch())
    with torch.no_grad():
        trained = plain_log_probs(tiny_policy.model, item)
        assert not torch.allclose(plain_log_probs(tiny_policy.sampler, item), trained, atol=1e-3)
        assert torch.equal(plain_log_probs(tiny_policy.sampler, item), stale)
        assert tiny_policy.sync() > 0
        assert torch.allclose(plain_log_probs(tiny_policy.sampler, item), trained, atol=1e-4)
        with tiny_policy.model.disable_adapter():
            assert not torch.allclose(plain_log_probs(tiny_policy.model, item), trained, atol=1e-3)


def test_nothing_to_train_is_refused(tiny_folder: Path) -> None:
    with pytest.raises((Refused, ValueError), match="no_such_module"):
        policy(tiny_folder, target_modules=("no_such_module",))
