"""Scripted readers: responses written beforehand, played through the real reading loop, without a model."""

from __future__ import annotations

from collections.abc import Iterable

from poimen_exp.gates import reading
from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.gates.reading import GateOverride
from poimen_exp.gates.types import Generation, Prompt, ReadingTask, Sampling, Trajectory

STOP_ID = 256
MALFORMED = "<think></think><check>yes</check><next>end</next>"
"""A response without its update part: its ``yes`` and its ``end`` count for nothing."""

_SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=64)


class ByteCodec:
    """A ``TextCodec`` whose ids are UTF-8 bytes; id 256 ends a response."""

    stop_ids = (STOP_ID,)

    def encode_template(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def plain_offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        """Every byte of a character has the span of the character."""
        return tuple((place, place + 1) for place, character in enumerate(text) for _ in character.encode())

    def count_plain(self, text: str) -> int:
        return len(self.plain_offsets(text))

    def decode(self, ids: tuple[int, ...]) -> str:
        return bytes(value for value in ids if value < STOP_ID).decode(errors="replace")

    def render(self, user: str) -> str:
        return f"user: {user}\nassistant: "


def byte_protocol() -> GateProtocol:
    """The gate protocol over bytes, with the shortest prompts."""
    return GateProtocol(ByteCodec(), "chunk_first", "terse", memory_tokens=64)


def turn_text(update: bool, *, end: bool = False, memory: str = "m") -> str:
    """A well-formed response. Spelled out here, so that the parser is not tested against its own inverse."""
    check, following = ("yes" if update else "no"), ("end" if end else "continue")
    return f"<think></think><check>{check}</check><update>{memory}</update><next>{following}</next>"


def answer_text(answer: str) -> str:
    """A well-formed answer."""
    return "\\boxed{" + answer + "}"


class Script:
    """A ``Generate`` that gives written responses in order, then empty ones, and keeps the prompts it was asked."""

    def __init__(self, responses: Iterable[str]) -> None:
        self._responses = list(responses)
        self.prompts: list[Prompt] = []

    async def __call__(self, prompt: Prompt, sampling: Sampling) -> Generation:  # noqa: ARG002 (a script draws nothing)
        place = len(self.prompts)
        self.prompts.append(prompt)
        text = self._responses[place] if place < len(self._responses) else ""
        ids = (*text.encode(), STOP_ID)
        return Generation(ids, (0.0,) * len(ids), clipped=False)


def play(
    task: ReadingTask, protocol: GateProtocol, responses: Iterable[str], override: GateOverride | None = None
) -> Trajectory:
    """The trajectory of a reader that gives these responses, in turn order, the answer last."""
    coroutine = reading.read(task, protocol, Script(responses), _SAMPLING, override)
    try:
        coroutine.send(None)
    except StopIteration as end:
        trajectory: Trajectory = end.value
        return trajectory
    raise RuntimeError("the reading waited for something other than its script")
