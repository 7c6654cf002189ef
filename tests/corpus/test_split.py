"""The split by project."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poimen_exp.corpus import split_projects
from poimen_exp.errors import Refused

NAMES = [f"project {n}" for n in range(20)]


def test_the_ranking_is_that_of_the_hash_of_seed_and_project() -> None:
    ranked = sorted(NAMES, key=lambda name: hashlib.sha256(f"7\t{name}".encode()).hexdigest())
    split = split_projects(NAMES, 7, val_fraction=0.1, test_fraction=0.25)
    assert set(split.projects("test")) == set(ranked[:5])  # round(0.25 * 20)
    assert set(split.projects("val")) == set(ranked[5:7])  # round(0.1 * 20)
    assert set(split.projects("train")) == set(ranked[7:])


@given(st.sets(st.text(), min_size=1, max_size=30), st.integers(), st.randoms())
def test_no_project_is_on_two_sides_and_row_order_changes_nothing(
    projects: set[str], seed: int, order: random.Random
) -> None:
    projects = {name.encode("utf-8", "replace").decode() for name in projects}
    rows = [*projects, *projects]
    order.shuffle(rows)
    split = split_projects(rows, seed, 0.15, 0.15)
    sides = [set(split.projects(side)) for side in ("test", "val", "train")]
    assert sum(map(len, sides)) == len(projects) == len(set().union(*sides))
    assert split == split_projects(sorted(projects), seed, 0.15, 0.15)
    assert len(sides[0]) == (max(1, round(0.15 * len(projects))) if len(projects) >= 3 else 0)


def test_another_seed_is_another_split() -> None:
    assert split_projects(NAMES, 0, 0.2, 0.2).side_of != split_projects(NAMES, 1, 0.2, 0.2).side_of


def test_small_fractions_still_hold_one_project_out() -> None:
    split = split_projects(NAMES[:3], 0, 0.0, 0.0)
    assert [len(split.projects(side)) for side in ("train", "val", "test")] == [1, 1, 1]
    assert split.note == ""


def test_fewer_than_three_projects_have_no_test_split_and_it_is_said() -> None:
    split = split_projects(NAMES[:2], 0, 0.1, 0.1)
    assert [len(split.projects(side)) for side in ("train", "val", "test")] == [1, 1, 0]
    assert "no test split" in split.note
    assert "no validation and no test split" in split_projects(NAMES[:1], 0, 0.1, 0.1).note


@pytest.mark.parametrize(("val", "test"), [(0.5, 0.5), (0.9, 0.1)])
def test_fractions_that_leave_nothing_to_train_on_are_refused(val: float, test: float) -> None:
    with pytest.raises(Refused, match="leave none to train on"):
        split_projects(NAMES[:4], 0, val, test)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(Refused, match=r"corpus\.val_fraction: got"):
        split_projects(NAMES, 0, fraction, 0.1)
