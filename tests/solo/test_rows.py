"""Rows laid out as tensors, and cut into micro-batches."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from poimen_exp.solo.rows import Row, micro_batches, pack, pad_left, pad_right

from .support import CPU, PAD, row, some_rows


def flat(cut: list[list[int]]) -> list[int]:
    return [place for places in cut for place in places]


def test_equal_prefixes_are_laid_out_once() -> None:
    packed = pack([row([5, 6, 7], 2, [9]), row([5, 6, 8, 8], 2, [9, 9]), row([4, 7], 1, [9])], PAD, CPU)
    assert packed.prefix_ids.tolist() == [[5, 6], [0, 4]]
    assert packed.prefix_mask.tolist() == [[True, True], [False, True]]
    assert packed.prefix_of.tolist() == [0, 0, 1]
    assert packed.suffix_ids.tolist() == [[0, 7], [8, 8], [0, 7]]
    assert packed.suffix_mask.tolist() == [[False, True], [True, True], [False, True]]
    assert packed.response_ids.tolist() == [[9, 0], [9, 9], [9, 0]]
    assert packed.response_mask.tolist() == [[True, False], [True, True], [True, False]]


def test_an_id_that_equals_the_padding_still_counts() -> None:
    packed = pack([row([5, 0], 1, [0, 0]), row([5, 0], 1, [0])], PAD, CPU)
    assert packed.response_mask.tolist() == [[True, True], [True, False]]
    assert packed.suffix_mask.all()


def test_padding_may_have_no_width() -> None:
    for pad in (pad_left, pad_right):
        ids, mask = pad([(), ()], PAD, CPU)
        assert ids.shape == mask.shape == (2, 0)
        assert ids.dtype == torch.int64


def test_rows_of_one_prefix_meet_in_one_micro_batch() -> None:
    rows = [row([1, 2, 3, place % 2], 3, [7]) for place in range(4)] + [row([4, 4, 4, 4], 3, [7])]
    mixed = [rows[0], rows[4], rows[1], rows[2], rows[3]]
    # One prefix of 3 and 4 rows of 1 + 1: 11 tokens. With the other prefix: 6 + 10.
    assert micro_batches(mixed, range(5), 11) == [[0, 2, 3, 4], [1]]
    assert micro_batches(mixed, range(5), 16) == [[0, 2, 3, 4, 1]]


def test_a_row_above_the_budget_goes_alone() -> None:
    rows = [row([1], 0, [7]), row([1] * 50, 0, [7]), row([1], 0, [7])]
    assert micro_batches(rows, range(3), 10) == [[0], [1], [2]]
    assert micro_batches([], [], 10) == []


def test_only_the_rows_asked_for_are_cut() -> None:
    assert sorted(flat(micro_batches(some_rows(), [4, 1], 1000))) == [1, 4]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12),
    st.integers(1, 80),
)
def test_micro_batches_hold_every_row_once_within_the_budget(shapes: list[tuple[int, int, int]], budget: int) -> None:
    rows: list[Row] = [
        row([9, prefix] * prefix + [1] * own, 2 * prefix, [7] * length) for prefix, own, length in shapes
    ]
    cut = micro_batches(rows, range(len(rows)), budget)
    assert sorted(flat(cut)) == list(range(len(rows)))
    for places in cut:
        packed = pack([rows[place] for place in places], PAD, CPU)
        padded = sum(ids.numel() for ids in (packed.prefix_ids, packed.suffix_ids, packed.response_ids))
        assert padded <= budget or len(places) == 1
