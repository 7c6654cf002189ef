"""Invariants of the advantages, on batches of any shape."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from poimen_exp.gates.advantages import mix_advantages, trajectory_advantages, turn_advantages
from poimen_exp.gates.scoring import Advantages, GateRows, row_advantages


@dataclass(frozen=True)
class Batch:
    totals: Tensor
    group: Tensor
    rows: GateRows


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Up to 4 groups of up to 5 trajectories of up to 4 chunks and an answer, some chunks unlabelled."""
    owners, totals, place, rewards = [], [], [], []
    for group in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 5))):
            trajectory = len(totals)
            owners.append(group)
            totals.append(draw(st.sampled_from([-0.75, 0.0, 0.1, 0.5, 1.0, 1.25, 2.0])))
            for step in range(draw(st.integers(1, 4))):
                place.append((trajectory, group, step))
                rewards.append(draw(st.sampled_from([1.0, -1.0, None])))
            place.append((trajectory, group, -1))
            rewards.append(None)
    columns = torch.tensor(place)
    valid = torch.tensor([reward is not None for reward in rewards])
    values = torch.tensor([0.0 if reward is None else reward for reward in rewards])
    rows = GateRows(columns[:, 0], columns[:, 1], columns[:, 2], valid, values)
    return Batch(torch.tensor(totals), torch.tensor(owners), rows)


def take(rows: GateRows, order: Tensor) -> GateRows:
    return GateRows(
        rows.trajectory[order], rows.group[order], rows.step[order], rows.valid[order], rows.update_reward[order]
    )


def advantages(batch: Batch, alpha: float = 0.9) -> Advantages:
    return row_advantages(batch.totals, batch.group, batch.rows, alpha, "group_step")


@given(batches())
def test_advantages_of_a_group_and_of_a_cell_sum_to_zero(batch: Batch) -> None:
    per_trajectory = trajectory_advantages(batch.totals, batch.group)
    for group in batch.group.unique():
        assert abs(float(per_trajectory[batch.group == group].sum())) < 1e-5
        for step in range(4):
            cell = (batch.rows.group == group) & (batch.rows.step == step)
            assert abs(float(advantages(batch).turn[cell].sum())) < 1e-5


@given(batches())
def test_a_naive_loop_gives_the_same(batch: Batch) -> None:
    rows, found = batch.rows, advantages(batch)
    for row in range(len(rows.step)):
        mates = [float(t) for t, g in zip(batch.totals, batch.group, strict=True) if g == rows.group[row]]
        own = float(batch.totals[rows.trajectory[row]])
        assert found.trajectory[row].item() == pytest.approx(own - sum(mates) / len(mates), abs=1e-5)
        cell = rows.valid & (rows.group == rows.group[row]) & (rows.step == rows.step[row])
        wanted = float(rows.update_reward[row] - rows.update_reward[cell].mean()) if rows.valid[row] else 0.0
        assert found.turn[row].item() == pytest.approx(wanted, abs=1e-5)


@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(batch: Batch, random: object) -> None:
    order = list(range(len(batch.rows.step)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = Batch(batch.totals, batch.group, take(batch.rows, torch.tensor(order)))
    assert torch.allclose(advantages(shuffled).mixed, advantages(batch).mixed[order], atol=1e-6)


@given(batches())
def test_rows_that_do_not_count_change_nothing(batch: Batch) -> None:
    """Padding: copies of every row with ``valid`` False, whatever reward they carry."""
    rows, count = batch.rows, len(batch.rows.step)
    padded = take(rows, torch.arange(count).repeat(2))
    padded.valid[count:] = False
    padded.update_reward[count:] = torch.nan
    found = row_advantages(batch.totals, batch.group, padded, 0.9, "group_step")
    assert torch.equal(found.turn[:count], advantages(batch).turn)
    assert not found.turn[count:].any()


@given(batches())
def test_a_group_does_not_depend_on_the_others(batch: Batch) -> None:
    one = batch.group == 0
    rows = take(batch.rows, (batch.rows.group == 0).nonzero()[:, 0])
    alone = row_advantages(batch.totals[one], batch.group[one], rows, 0.9, "group_step")
    assert torch.equal(alone.mixed, advantages(batch).mixed[batch.rows.group == 0])


@given(batches())
def test_alpha_one_and_zero_are_the_pure_terms_bit_for_bit(batch: Batch) -> None:
    pure = advantages(batch)
    assert torch.equal(advantages(batch, 1.0).mixed, pure.trajectory)
    assert torch.equal(advantages(batch, 0.0).mixed, pure.turn)


@given(st.lists(st.sampled_from([1e-9, 1.0, 1 / 3, 0.1]), min_size=1, max_size=7), st.floats(-2, 2))
def test_equal_rewards_give_exactly_zero(shifts: list[float], base: float) -> None:
    equal = torch.full((len(shifts),), base + shifts[0])
    assert trajectory_advantages(equal, torch.zeros(len(shifts), dtype=torch.int64)).tolist() == [0.0] * len(shifts)


def test_almost_equal_rewards_give_finite_small_advantages() -> None:
    found = trajectory_advantages(torch.tensor([1.0, 1.0 + 1e-6]), torch.zeros(2, dtype=torch.int64))
    assert torch.isfinite(found).all()
    assert 0 < float(found.abs().max()) < 1e-6


def test_a_nan_reward_stays_in_its_group() -> None:
    found = trajectory_advantages(torch.tensor([torch.nan, 1.0, 2.0, 0.0]), torch.tensor([0, 0, 1, 1]))
    assert torch.isnan(found[:2]).all()
    assert found[2:].tolist() == [1.0, -1.0]


def test_empty_batches_give_empty_advantages() -> None:
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert trajectory_advantages(none, ids).shape == (0,)
    assert turn_advantages(none, ids, ids, ids.bool()).shape == (0,)
    assert mix_advantages(none, none, 0.5).shape == (0,)
