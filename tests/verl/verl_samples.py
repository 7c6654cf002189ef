"""Hand-made trajectories, and a fake of verl's client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from poimen_exp.gates.scoring import ScoredTrajectory, score
from poimen_exp.gates.types import ExitTarget, GateTurn, Generation, Prompt, ReadingTask, Trajectory, Turn


def task(name: str = "t1", evidence: tuple[bool | None, ...] = (True, False, False)) -> ReadingTask:
    """A task whose exit target is chunk 0."""
    chunks = tuple(f"chunk {place}" for place in range(len(evidence)))
    return ReadingTask(name, "p", "q?", ("yes",), chunks, evidence, ExitTarget(True, 0))


def trajectory(of: ReadingTask, updates: tuple[bool | None, ...], answer: str | None = "yes") -> Trajectory:
    """A reading that wrote these update gates (None: unreadable) and stopped after the last of them."""
    turns = []
    for place, update in enumerate(updates):
        gate = None if update is None else GateTurn("", update, "m", end=place == len(updates) - 1)
        made = Generation((7, 8, 2), (-0.5, -0.25, -0.125), clipped=False)
        turns.append(Turn(place, Prompt((1, 2, 3, 4), 2), made, "text", gate, gate is not None, "m", 1))
    made = Generation((9, 2), (-1.0, -0.5), clipped=False)
    turns.append(Turn(None, Prompt((1, 5), 1), made, "answer", None, answer is not None, "m", 1))
    return Trajectory(of, tuple(turns), len(updates) - 1, answer)


def scored(updates: tuple[bool | None, ...], answer: str | None = "yes", sample: int = 0) -> ScoredTrajectory:
    """The reading, scored with the defaults."""
    read = trajectory(task(), updates, answer)
    return ScoredTrajectory(read, score(read, "exact", "zero_trajectory"), group=0, sample=sample)


@dataclass
class Output:
    """verl's ``TokenOutput``, as far as it is read."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str = "completed"
    extra_fields: dict[str, Any] = field(default_factory=lambda: {"min_global_steps": 3, "max_global_steps": 3})


class Client:
    """verl's client: answers every request with ``output`` after ``delay_s``."""

    def __init__(self, output: Output, delay_s: float = 0.0) -> None:
        self._output, self._delay_s = output, delay_s
        self.requests: list[dict[str, Any]] = []

    async def generate(self, **request: Any) -> Output:
        self.requests.append(request)
        await asyncio.sleep(self._delay_s)
        return self._output
