"""The readers that frame an evaluation, and the intervals around its means."""

from __future__ import annotations

from poimen_exp.evaluation.intervals import estimate
from poimen_exp.evaluation.readers import always_update, fit_position_rule, never_update, oracle
from poimen_exp.gates.types import ExitTarget, GateTurn, ReadingTask


def task(evidence: tuple[bool | None, ...], target: ExitTarget) -> ReadingTask:
    chunks = tuple(f"c{place}" for place in range(len(evidence)))
    return ReadingTask("t", "p", "q", ("a",), chunks, evidence, target)


def wrong(task_: ReadingTask, index: int) -> GateTurn:
    """A turn whose gates are the opposite of the labels; unlabelled: both open."""
    return GateTurn("", not task_.evidence[index], "memory", index != task_.exit.index)


def test_the_oracle_has_the_gates_of_the_labels_and_keeps_the_text() -> None:
    asked = task((False, True, False), ExitTarget(True, 1))
    override = oracle(asked)
    turns = [override(index, wrong(asked, index)) for index in range(3)]
    assert [turn.update for turn in turns] == [False, True, False]
    assert [turn.end for turn in turns] == [False, True, False]
    assert {turn.candidate for turn in turns} == {"memory"}


def test_the_oracle_reads_to_the_end_where_the_target_is_never() -> None:
    asked = task((False, False), ExitTarget(True, None))
    assert [oracle(asked)(index, GateTurn("", True, "", True)).end for index in range(2)] == [False, False]


def test_the_oracle_leaves_to_the_model_what_is_not_labelled() -> None:
    asked = task((None, True), ExitTarget(False))
    for update in (True, False):
        for end in (True, False):
            turn = oracle(asked)(0, GateTurn("", update, "", end))
            assert (turn.update, turn.end) == (update, end)


def test_always_and_never_read_to_the_end() -> None:
    asked = task((False, True), ExitTarget(True, 1))
    for reader, update in ((always_update, True), (never_update, False)):
        turns = [reader(asked)(index, GateTurn("", not update, "", True)) for index in range(2)]
        assert [(turn.update, turn.end) for turn in turns] == [(update, False)] * 2


def test_the_position_rule_finds_labels_that_lie_at_one_place() -> None:
    # Ten chunks, evidence always in the third: that tenth updates, and reading stops behind it (index 2 of 10).
    tasks = [task(tuple(place == 2 for place in range(10)), ExitTarget(True, 2))] * 5
    rule = fit_position_rule(tasks)
    assert rule.update == tuple(place == 2 for place in range(10))
    turns = [rule.reader(tasks[0])(index, GateTurn("", False, "", False)) for index in range(10)]
    assert [index for index, turn in enumerate(turns) if turn.end] == [2]


def test_the_position_rule_updates_nowhere_where_position_says_nothing() -> None:
    tasks = [task(tuple(place == at for place in range(10)), ExitTarget(True, at)) for at in range(10)]
    assert not any(fit_position_rule(tasks).update)


def test_the_position_rule_keeps_shut_where_no_label_or_as_many_of_both_lie() -> None:
    # Of two chunks one is in the first tenth, which has evidence in one task of two, and one in the sixth.
    tasks = [task((first, True), ExitTarget(True, 1)) for first in (False, True)]
    assert fit_position_rule(tasks).update == tuple(tenth == 5 for tenth in range(10))


def test_the_position_rule_counts_never_as_the_last_chunk() -> None:
    never, early = task((False,) * 10, ExitTarget(True, None)), task((True,) + (False,) * 9, ExitTarget(True, 0))
    assert fit_position_rule([never, never, early]).exit_share is None
    assert fit_position_rule([never, early, early]).exit_share == 0.0


def test_an_interval_is_over_projects_from_five_on_and_over_tasks_below() -> None:
    values = [0.0, 1.0] * 5
    tasks = [str(place) for place in range(10)]
    few = estimate(values, ["a", "b"] * 5, tasks, "turns")
    many = estimate(values, [f"p{place // 2}" for place in range(10)], tasks, "turns")
    assert few is not None
    assert many is not None
    assert (few.mean, few.count, few.counts, few.resampled) == (0.5, 10, "turns", "tasks")
    # Each project has one 0 and one 1: between projects nothing varies, so the interval has no width.
    assert (many.low, many.high, many.resampled) == (0.5, 0.5, "projects")
    assert few.low < 0.4 < 0.6 < few.high


def test_an_interval_holds_95_of_100_resamples() -> None:
    # One of three tasks is right: all three draws take it once in 27 times, which is between 1 in 40 and 1 in 20.
    found = estimate([1.0, 0.0, 0.0], ["p"] * 3, ["a", "b", "c"], "turns")
    assert found is not None
    assert (found.low, found.high) == (0.0, 1.0)


def test_a_task_weighs_by_its_values() -> None:
    # Of four draws three take task a in 5 of 100 times: 3 right of 3 + 3; four take it in 1 of 256.
    found = estimate([1.0] + [0.0] * 9, ["p"] * 10, list("abbbcccddd"), "turns")
    assert found is not None
    assert (found.mean, found.low, found.high) == (0.1, 0.0, 0.5)


def test_without_values_there_is_no_estimate() -> None:
    assert estimate([], [], [], "turns") is None
