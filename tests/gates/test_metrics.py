"""Every mean with its denominator."""

from __future__ import annotations

import pytest

from poimen_exp.gates import scoring
from poimen_exp.gates.check_script import MALFORMED
from poimen_exp.gates.metrics import ADVANTAGE_METRICS, GATE_METRICS, Means, advantage_metrics, gate_metrics

from .fakes import answer_text, scored, task, turn_text

YES, NO, END = turn_text(True), turn_text(False), turn_text(True, end=True)
RED = answer_text("red")


def test_the_metrics_of_two_readings() -> None:
    """Labels (F, T, F), target 1. The first reads two chunks rightly; the second reads all, one turn malformed:
    update rewards +1 +1 and -1 -1 +1."""
    batch = [scored(task(), [NO, END, RED]), scored(task(), [YES, MALFORMED, NO, answer_text("blue")], sample=1)]
    means = gate_metrics(batch)
    expected = {
        "gates/update_accuracy/evidence_present": (1 / 2, 2),
        "gates/update_accuracy/evidence_free": (2 / 3, 3),
        "gates/update_rate": (2 / 5, 5),
        "gates/exit/exact": (1 / 2, 2),
        "gates/exit/early": (0.0, 2),
        "gates/exit/late": (1 / 2, 2),
        "gates/format_correct": (6 / 7, 7),
        "gates/memory_tokens": (22 / 5, 5),  # 18 bytes of the first memory, then 1, 1, 1, 1
        "gates/chunks_read": (5 / 2, 2),
        "reward/total": (2 / 2, 2),
        "reward/outcome": (1 / 2, 2),
        "reward/exit": (-0.5 / 2, 2),
        "reward/format": (1 / 2, 2),
        "reward/update": (1 / 5, 5),
        "response_length/mean": (means.means()["response_length/mean"], 7),
        "response_length/clipped": (0.0, 7),
    }
    assert set(expected) == set(GATE_METRICS)
    assert means.counts == {name: count for name, (_, count) in expected.items()}
    assert means.means() == pytest.approx({name: value for name, (value, _) in expected.items()}, abs=1e-12)


def test_the_response_length_counts_the_token_that_ended_it() -> None:
    found = gate_metrics([scored(task((True,), 0), [END, RED])]).means()
    assert found["response_length/mean"] == (len(END) + 1 + len(RED) + 1) / 2


def test_a_metric_without_a_denominator_is_absent() -> None:
    means = gate_metrics([scored(task((None, None), answers=None, exit_known=False), [NO, NO, RED])])
    for name in ("gates/update_accuracy/evidence_present", "gates/update_accuracy/evidence_free", "reward/update"):
        assert name not in means.counts
        assert name not in means.means()
    assert not [name for name in means.counts if "exit" in name or "outcome" in name]
    assert gate_metrics([]).means() == {}


def test_an_unknown_exit_is_in_no_mean_of_a_task_with_answers() -> None:
    means = gate_metrics([scored(task(exit_known=False), [NO, END, RED]), scored(task(), [END, RED])])
    assert (means.counts["reward/outcome"], means.counts["reward/exit"]) == (2, 1)
    assert means.means()["reward/exit"] == -0.75  # early, of the one whose target is known


def test_an_early_exit_is_early() -> None:
    found = gate_metrics([scored(task(), [END, RED])]).means()
    assert [found[f"gates/exit/{kind}"] for kind in ("exact", "early", "late")] == [0.0, 1.0, 0.0]


def test_never_is_exact_at_the_last_chunk() -> None:
    batch = [scored(task((False, False), None), [NO, NO, RED]), scored(task((False, False), None), [END, RED])]
    found = gate_metrics(batch).means()
    assert [found[f"gates/exit/{kind}"] for kind in ("exact", "early", "late")] == [0.5, 0.5, 0.0]


def test_batches_without_signal_are_counted() -> None:
    """Group 0: two equal readings. Group 1: one reading, alone. Groups 3; cells (0,0) (0,1) (1,0) (2,0) tie or stand
    alone; in group 2 chunk 0 differs."""
    batch = [
        scored(task(), [NO, END, RED], 0, 0),
        scored(task(), [NO, END, RED], 0, 1),
        scored(task(), [END, RED], 1, 0),
        scored(task(), [turn_text(False, end=True), RED], 2, 0),
        scored(task(), [YES, NO, NO, RED], 2, 1),
    ]
    means = advantage_metrics(batch, *scoring.advantages_of(batch, 0.9, "group_step"))
    assert set(means.counts) == set(ADVANTAGE_METRICS)
    # Cells: (0,0) tie, (0,1) tie, (1,0) alone, (2,0) differs, (2,1) alone, (2,2) alone; groups: 0 ties, 1 is alone.
    assert means.means() == pytest.approx(
        {
            "advantage/singletons": 4 / 9,
            "advantage/zero_trajectory_groups": 2 / 3,
            "advantage/zero_turn_cells": 5 / 6,
        },
        abs=1e-12,
    )
    assert means.counts["advantage/zero_turn_cells"] == 6


def test_means_of_parts_weigh_by_their_denominators() -> None:
    means, other = Means(), Means()
    means.add("a", [1.0, 2.0])
    means.add("a", [6.0])
    means.add("b", [])
    other.add("a", [7.0])
    other.add("c", [1.0])
    means.merge(other)
    # (1 + 2 + 6 + 7) / 4, where the mean of the means would be 5.
    assert means.prefixed("val/") == ({"val/a": 4.0, "val/c": 1.0}, {"val/a": 4, "val/c": 1})


def test_what_is_no_number_is_in_no_mean() -> None:
    means = Means()
    means.add("a", [float("nan"), 2.0, float("inf")])
    assert (means.means(), means.counts) == ({"a": 2.0}, {"a": 1})
