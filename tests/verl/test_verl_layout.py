"""Where rows go: whole groups to mini-batches, equal shares to ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poimen_exp.errors import RunFailed
from poimen_exp.verl_backend.layout import Layout, cut_groups, lay_out


def mini_batches_of(layout: Layout, ranks: int, count: int) -> list[list[int]]:
    """What verl's workers make of it: a contiguous share a rank, each cut into equal runs."""
    share = len(layout.order) // ranks
    per_rank = layout.rows_per_mini_batch // ranks
    shares = [layout.order[rank * share : (rank + 1) * share] for rank in range(ranks)]
    return [
        [row for rank_rows in shares for row in rank_rows[place * per_rank : (place + 1) * per_rank]]
        for place in range(count)
    ]


def test_mini_batches_hold_whole_groups_however_many_rows_the_groups_have() -> None:
    # a has 3 rows, b 1, c 2, d 2: two mini-batches, {a, b} and {c, d}, of 4 rows each: nothing to pad.
    layout = lay_out(["a", "a", "a", "b", "c", "c", "d", "d"], [9] * 8, count=2, ranks=1)
    assert layout.pads == 0
    assert layout.rows_per_mini_batch == 4
    assert [sorted(mini) for mini in mini_batches_of(layout, 1, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_shorter_mini_batches_are_filled_with_padding_rows() -> None:
    # {a}: 3 rows, {b}: 1 row; on 2 ranks 3 rows take 2 a rank: 4 a mini-batch, so 1 + 3 = 4 padding rows, 4..7.
    layout = lay_out(["a", "a", "a", "b"], [5, 5, 5, 5], count=2, ranks=2)
    assert layout.pads == 4
    assert layout.rows_per_mini_batch == 4
    first, second = mini_batches_of(layout, 2, 2)
    assert sorted(row for row in first if row < 4) == [0, 1, 2]
    assert sorted(row for row in second if row < 4) == [3]


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    # Longest first to the emptier rank: 50 | 40; 40 + 30 | 50 + 20: 70 and 70 tokens.
    layout = lay_out(["a", "a", "a", "a"], [50, 20, 40, 30], count=1, ranks=2)
    assert {tuple(layout.order[:2]), tuple(layout.order[2:])} == {(0, 1), (2, 3)}


def test_fixed_micro_batches_round_the_rows_of_a_rank_up() -> None:
    layout = lay_out(["a"] * 5, [1] * 5, count=1, ranks=1, rows_multiple=4)
    assert (layout.rows_per_mini_batch, layout.pads) == (8, 3)


def test_a_shuffle_moves_groups_and_never_tears_one() -> None:
    groups = [name for name in "abcdefgh" for _ in range(2)]
    layout = lay_out(groups, [1] * 16, count=4, ranks=1, shuffle_seed=3)
    minis = [{groups[row] for row in mini} for mini in mini_batches_of(layout, 1, 4)]
    assert sorted(name for mini in minis for name in mini) == list("abcdefgh")
    assert minis != [{"a", "b"}, {"c", "d"}, {"e", "f"}, {"g", "h"}]


def test_a_group_that_was_lost_leaves_a_smaller_mini_batch() -> None:
    assert cut_groups(["a", "b", "c"], 2, None) == [["a", "b"], ["c"]]


def test_fewer_groups_than_optimizer_steps_end_the_run() -> None:
    with pytest.raises(RunFailed, match=r"1 groups came back from the rollout, expected at least 2"):
        cut_groups(["a", "a"], 2, None)


@given(
    sizes=st.lists(st.integers(1, 7), min_size=2, max_size=9),
    count=st.integers(1, 2),
    ranks=st.integers(1, 3),
    multiple=st.integers(1, 3),
)
def test_every_row_is_in_one_mini_batch_and_no_group_in_two(
    sizes: list[int], count: int, ranks: int, multiple: int
) -> None:
    groups = [str(group) for group, size in enumerate(sizes) for _ in range(size)]
    layout = lay_out(groups, list(range(1, len(groups) + 1)), count=count, ranks=ranks, rows_multiple=multiple)
    assert sorted(layout.order) == list(range(len(groups) + layout.pads))
    assert len(layout.order) == count * layout.rows_per_mini_batch
    assert layout.rows_per_mini_batch % (ranks * multiple) == 0
    owners = [{groups[row] for row in mini if row < len(groups)} for mini in mini_batches_of(layout, ranks, count)]
    assert sum(len(owner) for owner in owners) == len(sizes)
