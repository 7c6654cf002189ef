"""Runs many readings side by side: each asks for its next turn, the engine answers whoever has asked."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

from poimen_exp.gates.types import FailedRollout, Generation, Prompt, ReadingTask, Sampling, Trajectory
from poimen_exp.solo.engine import Request

Answer = Callable[[int, Generation | Exception], Request | None]
"""Takes what came of a reading's request, an exception where it could not be served; gives its next request."""

Serve = Callable[[Mapping[int, Request], Answer], None]
"""Continues requests, by reading, until no reading asks any more."""

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


def drive(readings: Sequence[tuple[ReadingTask, Reading]], serve: Serve) -> list[Trajectory | FailedRollout]:
    """Runs readings to their ends; no reading waits for another. Order is kept.

    A reading whose request failed ends as a ``FailedRollout``; the others go on.
    """
    done: dict[int, Trajectory | FailedRollout] = {}

    def advance(place: int, step: Callable[[], Any]) -> Request | None:
        try:
            request: Request = step()
        except StopIteration as end:
            done[place] = end.value
        except GenerationFailed as error:
            done[place] = FailedRollout(readings[place][0], str(error))
        else:
            return request
        return None

    def answer(place: int, result: Generation | Exception) -> Request | None:
        reading = readings[place][1]
        if isinstance(result, Exception):
            failure = GenerationFailed(f"{type(result).__name__}: {result}")
            return advance(place, lambda: reading.throw(failure))
        return advance(place, lambda: reading.send(result))

    started = {place: advance(place, lambda of=of: of.send(None)) for place, (_, of) in enumerate(readings)}  # type: ignore[misc]
    serve({place: request for place, request in started.items() if request is not None}, answer)
    return [done[place] for place in range(len(readings))]


class GenerationFailed(Exception):
    """Thrown into a reading whose request the engine could not serve."""
