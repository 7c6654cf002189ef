"""From trajectories to scores, rows and advantages."""

from __future__ import annotations

import pytest
import torch

from poimen_exp.gates import scoring
from poimen_exp.gates.check_script import MALFORMED
from poimen_exp.gates.rewards import score_trajectory

from .fakes import answer_text, scored, task, turn_text

YES, NO, END = turn_text(True), turn_text(False), turn_text(True, end=True)
RED = answer_text("red")


def test_a_right_reading_scores_two_with_answers_and_one_without() -> None:
    assert scored(task(), [NO, END, RED]).score.total == 2.0
    without = scored(task(answers=None), [NO, END, RED]).score
    assert (without.total, without.has_outcome, without.outcome) == (1.0, False, 0.0)


def test_an_unparsed_answer_breaks_the_format() -> None:
    assert scored(task(), [NO, END, "red"]).score.total == 0.0
    # Outcome 0 (nothing was answered), exit 0, format 0.
    assert scored(task(), [NO, END, "red"], on_unparsed="zero_format").score.total == 0.0
    # Outcome 1, exit 0, format 0.
    assert scored(task(), [MALFORMED, END, RED], on_unparsed="zero_format").score.total == 1.0


def test_an_unknown_exit_target_gives_no_exit_part() -> None:
    early = scored(task(exit_known=False), [END, RED]).score
    assert (early.total, early.exit, early.has_exit) == (2.0, 0.0, False)


def test_labels_of_chunks_that_were_not_read_do_not_count() -> None:
    assert scored(task((True, False, True), 2), [END, RED]).score.update == (1.0,)


def test_the_matcher_decides_the_outcome() -> None:
    answer = answer_text("red paint")
    assert scored(task(), [NO, END, answer]).score.outcome == 0.0
    assert scored(task(), [NO, END, answer], matcher="contains").score.outcome == 1.0
    assert scored(task(), [NO, END, answer], matcher="f1").score.outcome == pytest.approx(2 / 3, abs=1e-12)


def test_lengths_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ValueError, match="got 1 gates and 2 labels"):
        score_trajectory([True], [True, False], [True], 0, 0, 1, 1.0)
    with pytest.raises(ValueError, match="got no turns"):
        score_trajectory([], [], [], 0, 0, 1, 1.0)


def test_rows_stand_in_the_order_of_trajectories_and_turns() -> None:
    batch = [scored(task((None, True), 1), [NO, END, RED], group=4), scored(task(), [END, RED], group=1)]
    rows = scoring.gate_rows(batch)
    assert rows.trajectory.tolist() == [0, 0, 0, 1, 1]
    assert rows.group.tolist() == [4, 4, 4, 1, 1]
    assert rows.step.tolist() == [0, 1, scoring.ANSWER_STEP, 0, scoring.ANSWER_STEP]
    assert rows.valid.tolist() == [False, True, False, True, False]
    assert rows.update_reward.tolist() == [0.0, 1.0, 0.0, -1.0, 0.0]


def test_the_row_of_a_malformed_turn_carries_its_punishment() -> None:
    rows = scoring.gate_rows([scored(task((False, True), 1), [MALFORMED, END, RED])])
    assert rows.valid.tolist() == [True, True, False]
    assert rows.update_reward.tolist() == [-1.0, 1.0, 0.0]


def test_answer_rows_carry_the_trajectory_term_alone() -> None:
    batch = [
        scored(task(), [NO, END, RED], 0, 0),
        scored(task(), [YES, END, RED], 0, 1),
        scored(task(), [YES, NO, NO, RED]),
    ]
    rows, found = scoring.advantages_of(batch, 0.25, "group_step")
    answers = rows.step == scoring.ANSWER_STEP
    # Totals 2, 2 and 1.5 (late): mean 11/6.
    assert torch.allclose(found.mixed[answers], torch.tensor([1 / 24, 1 / 24, -1 / 12]), atol=1e-6)


def test_a_reading_that_failed_leaves_the_others_as_if_it_had_never_been() -> None:
    whole = [
        scored(task(), script, 0, n) for n, script in enumerate(([NO, END, RED], [END, RED], [YES, YES, YES, RED]))
    ]
    two = scoring.advantages_of(whole[:2], 0.9, "group_step")[1].mixed
    # Totals 2 and 1.25 (early): 1.625 is their mean; the update rewards at chunk 0 are +1 and -1.
    assert torch.allclose(two, torch.tensor([0.4375, 0.3375, 0.3375, -0.4375, -0.3375]), atol=1e-6)
    assert not torch.allclose(scoring.advantages_of(whole, 0.9, "group_step")[1].mixed[:5], two)


def test_no_trajectories_give_no_rows() -> None:
    rows, found = scoring.advantages_of([], 0.9, "group_step")
    assert rows.step.shape == found.mixed.shape == (0,)
