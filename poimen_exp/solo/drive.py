"""Runs many readings side by side: each asks for its next turn, the engine answers all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from poimen_exp.gates.types import FailedRollout, Generation, Prompt, ReadingTask, Sampling, Trajectory
from poimen_exp.solo.engine import Request

AnswerAll = Callable[[Sequence[Request]], Sequence[Generation | Exception]]
"""Continues every request; an exception in a place fails the one reading that asked."""

Reading = Coroutine[Any, Any, Trajectory]


class _Ask:
    """What a reading awaits: hands the request to the driver and gives back its generation."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def __await__(self) -> Generator[Request, Generation, Generation]:
        return (yield self.request)


async def ask(prompt: Prompt, sampling: Sampling) -> Generation:
    """The ``generate`` to start readings with that ``drive`` runs."""
    return await _Ask(Request(prompt, sampling))


def drive(readings: Sequence[tuple[ReadingTask, Reading]], answer_all: AnswerAll) -> list[Trajectory | FailedRollout]:
    """Runs readings to their ends, in rounds: in each, every live reading gets its next turn. Order is kept.

    A reading whose request failed ends as a ``FailedRollout``; the others go on.
    """
    done: dict[int, Trajectory | FailedRollout] = {}
    waiting: dict[int, Request] = {}

    def advance(place: int, step: Callable[[], Any]) -> None:
        try:
            waiting[place] = step()
        except StopIteration as end:
            done[place] = end.value
        except GenerationFailed as error:
            done[place] = FailedRollout(readings[place][0], str(error))

    for place, (_, reading) in enumerate(readings):
        advance(place, lambda reading=reading: reading.send(None))  # type: ignore[misc]
    while waiting:
        asked, waiting = waiting, {}
        answers = answer_all(list(asked.values()))
        for place, answer in zip(asked, answers, strict=True):
            reading = readings[place][1]
            if isinstance(answer, Exception):
                failure = GenerationFailed(f"{type(answer).__name__}: {answer}")
                advance(place, lambda reading=reading, failure=failure: reading.throw(failure))  # type: ignore[misc]
            else:
                advance(place, lambda reading=reading, answer=answer: reading.send(answer))  # type: ignore[misc]
    return [done[place] for place in range(len(readings))]


class GenerationFailed(Exception):
    """Thrown into a reading whose request the engine could not serve."""
