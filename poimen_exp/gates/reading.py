"""The reading loop: question and chunks in, one trajectory out. Training, evaluation and serving all run this."""

from __future__ import annotations

from collections.abc import Callable

from poimen_exp.gates.protocol import FIRST_MEMORY, GateProtocol, parse_answer, parse_turn
from poimen_exp.gates.types import GateTurn, Generate, ReadingTask, Sampling, Trajectory, Turn

GateOverride = Callable[[int, GateTurn], GateTurn]
"""Replaces the gates of a parsed turn: (chunk index, what the model wrote) -> what is obeyed and recorded."""


async def read(
    task: ReadingTask,
    protocol: GateProtocol,
    generate: Generate,
    sampling: Sampling,
    override: GateOverride | None = None,
) -> Trajectory:
    """Reads the chunks in order until the exit gate opens or they end, then answers from the memory.

    ``check=no`` and a malformed turn keep the memory byte for byte; an ``end`` applies the update of its own turn
    first; the answer turn always comes.

    Args:
        override: for readers whose gates are not the model's (oracle, always, never, position-only).
    """
    memory = FIRST_MEMORY
    memory_tokens = protocol.cut_memory(memory)[1]
    turns: list[Turn] = []
    for index, chunk in enumerate(task.chunks):
        prompt = protocol.turn_prompt(task.question, chunk, memory)
        generation = await generate(prompt, sampling)
        text = protocol.text_of(generation.ids)
        gate = parse_turn(text)
        if gate is not None and override is not None:
            gate = override(index, gate)
        if gate is not None and gate.update:
            memory, memory_tokens = protocol.cut_memory(gate.candidate)
        turns.append(Turn(index, prompt, generation, text, gate, gate is not None, memory, memory_tokens))
        if gate is not None and gate.end:
            break
    exit_index = len(turns) - 1
    prompt = protocol.answer_prompt(task.question, memory)
    generation = await generate(prompt, sampling)
    text = protocol.text_of(generation.ids)
    answer = parse_answer(text)
    turns.append(Turn(None, prompt, generation, text, None, answer is not None, memory, memory_tokens))
    return Trajectory(task, tuple(turns), exit_index, answer)
