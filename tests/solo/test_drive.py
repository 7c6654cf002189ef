"""Many readings side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poimen_exp.gates.check_script import answer_text, byte_protocol, turn_text
from poimen_exp.gates.reading import read
from poimen_exp.gates.types import ExitTarget, FailedRollout, Generation, ReadingTask, Sampling, Trajectory
from poimen_exp.solo.drive import Answer, ask, drive
from poimen_exp.solo.engine import Request

SAMPLING = Sampling(1.0, 1.0, -1, 8)


class Answers:
    """Gives every reading that asks the next response of its script; an exception in a script is handed on."""

    def __init__(self, scripts: Sequence[Sequence[str | Exception]]) -> None:
        self._left = [list(script) for script in scripts]
        self.rounds: list[int] = []

    def __call__(self, requests: Mapping[int, Request], answer: Answer) -> None:
        asking = list(requests)
        while asking:
            self.rounds.append(len(asking))
            asking = [place for place in asking if answer(place, self._next(place)) is not None]

    def _next(self, place: int) -> Generation | Exception:
        text = self._left[place].pop(0)
        if isinstance(text, Exception):
            return text
        return Generation(tuple(text.encode()), (0.0,) * len(text), False)


def run(scripts: Sequence[Sequence[str | Exception]]) -> tuple[list[Trajectory | FailedRollout], Answers]:
    chunks, labels, target = ("a", "b", "c"), (False, True, False), ExitTarget(True, 1)
    tasks = [ReadingTask(f"t{place}", "p", "q", None, chunks, labels, target) for place in range(len(scripts))]
    answers = Answers(scripts)
    readings = [(of, read(of, byte_protocol(), ask, SAMPLING)) for of in tasks]
    return drive(readings, answers), answers


STOP_AT_ONCE = [turn_text(True, end=True), answer_text("short")]
READ_ALL = [turn_text(False), turn_text(True), turn_text(False), answer_text("long")]


def test_every_live_reading_gets_its_next_turn_in_each_round() -> None:
    results, answers = run([STOP_AT_ONCE, READ_ALL, STOP_AT_ONCE])
    assert answers.rounds == [3, 3, 1, 1]
    assert [result.answer for result in results if isinstance(result, Trajectory)] == ["short", "long", "short"]
    assert [result.exit_index for result in results if isinstance(result, Trajectory)] == [0, 2, 0]


def test_a_failed_request_fails_its_own_reading_only() -> None:
    results, answers = run([READ_ALL, [turn_text(False), RuntimeError("out of memory")], STOP_AT_ONCE])
    assert answers.rounds == [3, 3, 1, 1]
    failed = results[1]
    assert isinstance(failed, FailedRollout)
    assert failed.task.task_id == "t1"
    assert failed.reason == "RuntimeError: out of memory"
    assert [type(result) for result in results] == [Trajectory, FailedRollout, Trajectory]
    assert [result.answer for result in results if isinstance(result, Trajectory)] == ["long", "short"]


def test_a_reading_may_fail_before_its_first_token_and_all_may_fail() -> None:
    results, answers = run([[ConnectionError("refused")], [ConnectionError("refused")]])
    assert answers.rounds == [2]
    assert [result.reason for result in results if isinstance(result, FailedRollout)] == [
        "ConnectionError: refused"
    ] * 2


def test_no_readings_ask_for_nothing() -> None:
    assert run([])[0] == []
