"""The text protocol of a turn: two prompt layouts, and a strict parser for what comes back."""

from __future__ import annotations

import re
from typing import Literal, get_args

from poimen_exp.errors import Refused
from poimen_exp.gates.codec import TextCodec
from poimen_exp.gates.types import GateTurn, Prompt

PROTOCOL_VERSION = "poimen.protocol/1"
FIRST_MEMORY = "No previous memory"
"""Memory before anything was read (GRU-Mem)."""

Layout = Literal["chunk_first", "memory_first"]
Wording = Literal["full", "terse"]
"""``full`` explains the task and the form; ``terse`` only labels the parts, for models trained on the form."""

_TAGS = ("<think>", "</think>", "<check>", "</check>", "<update>", "</update>", "<next>", "</next>")
_TURN = re.compile(
    r"\s*<think>(?P<think>.*?)</think>"
    r"\s*<check>\s*(?P<check>yes|no)\s*</check>"
    r"\s*<update>(?P<update>.*?)</update>"
    r"\s*<next>\s*(?P<next>continue|end)\s*</next>\s*",
    re.DOTALL,
)

_FULL_TURN = """You read a long history chunk by chunk. A short memory is all you will have to answer one question.
For the chunk below, reply with exactly these four parts and nothing else:
<think>what the chunk holds for the question</think>
<check>yes or no: does the chunk hold something the memory needs</check>
<update>the whole new memory</update>
<next>continue, or end if the memory now holds everything the question asks for</next>

"""
_FULL_ANSWER = """Answer the question from the memory alone. Write the answer, as short as it can be, inside \\boxed{}.

"""
_INSTRUCTION: dict[Wording, tuple[str, str]] = {"full": (_FULL_TURN, _FULL_ANSWER), "terse": ("", "")}

# Private-use characters: they survive chat templates, and nothing else in a template has them.
_SLOT = re.compile("\ue000(question|chunk|memory)\ue001")
_QUESTION, _CHUNK, _MEMORY = (f"\ue000{name}\ue001" for name in ("question", "chunk", "memory"))
_TURN_BODY: dict[Layout, str] = {
    "chunk_first": f"Question: {_QUESTION}\nChunk:\n{_CHUNK}\nMemory: {_MEMORY}",
    "memory_first": f"Question: {_QUESTION}\nMemory: {_MEMORY}\nChunk:\n{_CHUNK}",
}
_ANSWER_BODY = f"Question: {_QUESTION}\nMemory: {_MEMORY}\nAnswer:"


class GateProtocol:
    """Builds the prompts of a reading and reads its responses.

    Args:
        codec: the model's tokenizer.
        layout: ``chunk_first`` lets the rollouts of a group share question and chunk; ``memory_first`` is the
            order of MemAgent's prompt.
        wording: how much the prompt explains.
        memory_tokens: longest memory, in tokens.
    """

    def __init__(self, codec: TextCodec, layout: Layout, wording: Wording, memory_tokens: int) -> None:
        if layout not in get_args(Layout):
            raise Refused(f"gates.layout: got {layout!r}, expected one of {', '.join(get_args(Layout))}")
        if wording not in get_args(Wording):
            raise Refused(f"gates.wording: got {wording!r}, expected one of {', '.join(get_args(Wording))}")
        self.codec = codec
        self.layout, self.wording, self.memory_tokens = layout, wording, memory_tokens
        turn, answer = _INSTRUCTION[wording]
        self._turn = _segments(codec, turn + _TURN_BODY[layout])
        self._answer = _segments(codec, answer + _ANSWER_BODY)

    def turn_prompt(self, question: str, chunk: str, memory: str) -> Prompt:
        """Prompt that asks for the gates and the candidate memory of one chunk."""
        return self._fill(self._turn, {"question": question, "chunk": chunk, "memory": memory})

    def answer_prompt(self, question: str, memory: str) -> Prompt:
        """Prompt that asks for the answer from the memory alone."""
        return self._fill(self._answer, {"question": question, "memory": memory})

    def _fill(self, segments: tuple[_Segment, ...], values: dict[str, str]) -> Prompt:
        ids: list[int] = []
        shared: int | None = None
        for segment in segments:
            if segment.slot == "memory" and shared is None:
                shared = len(ids)
            ids.extend(segment.ids if segment.slot is None else self.codec.encode_plain(values[segment.slot]))
        assert shared is not None  # both bodies hold a memory slot
        return Prompt(tuple(ids), shared)

    def turn_overhead(self) -> int:
        """Tokens of a turn's prompt that are neither question, chunk nor memory."""
        return sum(len(segment.ids) for segment in self._turn)

    def text_of(self, ids: tuple[int, ...]) -> str:
        """Text of a response, without the token that ended it."""
        if ids and ids[-1] in self.codec.stop_ids:
            ids = ids[:-1]
        return self.codec.decode(ids)

    def cut_memory(self, text: str) -> tuple[str, int]:
        """The longest head of ``text`` within ``memory_tokens``, and its length in tokens.

        Cut between characters, never inside one; a head whose own encoding is longer than its place in the whole
        (a merge lost at the cut) is shortened further.
        """
        count = len(self.codec.encode_plain(text))
        if count <= self.memory_tokens:
            return text, count
        offsets = self.codec.plain_offsets(text)
        for keep in range(self.memory_tokens, 0, -1):
            # A character spread over several byte tokens has the same span in each: cut before it.
            end = offsets[keep][0] if offsets[keep][0] < offsets[keep - 1][1] else offsets[keep - 1][1]
            head = text[:end]
            count = len(self.codec.encode_plain(head))
            if count <= self.memory_tokens:
                return head, count
        return "", 0


class _Segment:
    """A piece of a prompt: ids of fixed text, or the name of a slot."""

    __slots__ = ("ids", "slot")

    def __init__(self, ids: tuple[int, ...], slot: str | None) -> None:
        self.ids, self.slot = ids, slot


def _segments(codec: TextCodec, body: str) -> tuple[_Segment, ...]:
    parts = _SLOT.split(codec.render(body))
    segments = []
    for position, part in enumerate(parts):  # fixed text at even positions, slot names at odd ones
        if position % 2:
            segments.append(_Segment((), part))
        elif part:
            segments.append(_Segment(codec.encode_template(part), None))
    slots = [segment.slot for segment in segments if segment.slot]
    wanted = _SLOT.findall(body)
    if slots != wanted:
        raise Refused(f"the model's chat template lost parts of the prompt: got {slots}, expected {wanted}")
    return tuple(segments)


def parse_turn(text: str) -> GateTurn | None:
    """The gates of a response, or None unless it is the four parts in order, each once, and nothing else."""
    if any(text.count(tag) != 1 for tag in _TAGS):
        return None
    match = _TURN.fullmatch(text)
    if match is None:
        return None
    return GateTurn(
        think=match["think"].strip(),
        update=match["check"] == "yes",
        candidate=match["update"].strip(),
        end=match["next"] == "end",
    )


def format_turn(turn: GateTurn) -> str:
    """The response that ``parse_turn`` reads back as ``turn``: used for warm starts, scripted readers and tests."""
    check, following = ("yes" if turn.update else "no"), ("end" if turn.end else "continue")
    return f"<think>{turn.think}</think><check>{check}</check><update>{turn.candidate}</update><next>{following}</next>"


def parse_answer(text: str) -> str | None:
    """Text inside the last ``\\boxed{}`` with balanced braces, or None where there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for position in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None
