"""Readings whose every response is given: what a perfect and a lying model would write."""

from __future__ import annotations

import asyncio

from poimen_exp.gates.protocol import FIRST_MEMORY, GateProtocol, format_turn
from poimen_exp.gates.reading import read
from poimen_exp.gates.types import GateTurn, Generation, Prompt, ReadingTask, Sampling, Trajectory
from poimen_exp.quickstart.logs import log_note
from poimen_exp.quickstart.turns import response_ids, verdict

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=48)


def scripted_readings(task: ReadingTask, protocol: GateProtocol, lie: bool) -> list[Trajectory]:
    """One reading of a single-evidence task; a liar reads all, never updates and answers what it never kept."""
    texts = _lies(task) if lie else _truth(task)
    queue = iter(texts)

    async def generate(prompt: Prompt, sampling: Sampling) -> Generation:  # noqa: ARG001
        ids = response_ids(next(queue), protocol.codec)
        return Generation(ids, (0.0,) * len(ids), False)

    return [asyncio.run(read(task, protocol, generate, SAMPLING))]


def _truth(task: ReadingTask) -> list[str]:
    assert task.exit.index is not None
    assert task.answers
    note = log_note(task, task.exit.index)
    before = format_turn(GateTurn(verdict(False, False), False, FIRST_MEMORY, False))
    at_target = format_turn(GateTurn(verdict(True, True), True, note, True))
    return [before] * task.exit.index + [at_target, f"\\boxed{{{task.answers[0]}}}"]


def _lies(task: ReadingTask) -> list[str]:
    lies = [
        format_turn(GateTurn(verdict(not label, index != task.exit.index), False, "- web wiki zinc", False))
        for index, label in enumerate(task.evidence)
    ]
    return [*lies, "\\boxed{nowhere}"]
