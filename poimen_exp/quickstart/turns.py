"""Supervised turns made from labels: what a reader should have written at every chunk of a task."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Literal

from poimen_exp.gates.codec import TextCodec
from poimen_exp.gates.protocol import FIRST_MEMORY, GateProtocol, format_turn, parse_answer, parse_turn
from poimen_exp.gates.types import GateTurn, ReadingTask

TurnPair = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt ids and response ids, the end-of-turn token included."""
GateSource = Literal["label", "random"]
Note = Callable[[ReadingTask, int], str]
"""What a chunk adds to the memory; empty if nothing."""

UPDATE_RATE = 0.5
END_RATE = 0.4
"""How often the written gates open under ``gates="random"``."""
FOLLOW_RATE = 0.7
"""How often an evidence chunk enters the memory that later chunks see under ``gates="random"``."""

_UNKNOWN = "unknown"
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")
_WORD = re.compile(r"\w+")
_CONTENT = re.compile(r"(?<=<think>).*(?=</think>)|(?<=<update>).*(?=</update>)", re.DOTALL)


def constructed_turns(
    task: ReadingTask,
    protocol: GateProtocol,
    rng: random.Random,
    gates: GateSource = "label",
    note: Note | None = None,
    memory: str = FIRST_MEMORY,
) -> list[TurnPair]:
    """Prompt and response of every chunk of ``task`` and of its answer turn.

    The verdict in ``<think>`` comes from the labels, the candidate is the old memory and the chunk's note. With
    ``gates="label"`` the gates are right and reading ends at the exit target. With ``"random"`` they are coins
    independent of all else, every chunk is read, and evidence enters the memory by another coin, so that the prompts
    also show memories that wrong gates leave behind.

    Chunks without a label, a task without a known exit, one without answers: no turn is made up for what is not
    known. A turn whose text would not parse back (corpus text that spells a tag) is left out and keeps the memory, as
    in a reading.

    Args:
        note: ``evidence_note`` if left out, with each evidence chunk's share of the memory.
        memory: memory before the first chunk.
    """
    wanted = {index for index, label in enumerate(task.evidence) if label}
    share = max(1, (protocol.memory_tokens - len(wanted)) // max(1, len(wanted)))
    held: set[int] = set()
    pairs: list[TurnPair] = []
    for index, chunk in enumerate(task.chunks):
        label = task.evidence[index]
        if label is None:
            continue
        added = "" if not label else note(task, index) if note else evidence_note(task, index, protocol, share)
        candidate = merge_memory(memory, added, protocol)
        complete = bool(wanted) and wanted <= held | ({index} if label else set())
        turn, follow = _turn(gates, rng, verdict(label, complete), candidate, label, index == task.exit.index)
        text = format_turn(turn)
        if parse_turn(text) is None:
            continue
        if task.exit.known:
            prompt = protocol.turn_prompt(task.question, chunk, memory)
            pairs.append((prompt.ids, response_ids(text, protocol.codec)))
        if label and follow:
            memory = candidate
            held.add(index)
        if gates == "label" and turn.end:
            break
    if task.answers and None not in task.evidence:
        answer = task.answers[0] if wanted <= held else _UNKNOWN
        ids = protocol.answer_prompt(task.question, memory).ids
        pairs += _answer_pair(protocol, ids, answer)
    return pairs


def _turn(
    gates: GateSource, rng: random.Random, think: str, candidate: str, label: bool, at_exit: bool
) -> tuple[GateTurn, bool]:
    if gates == "label":
        return GateTurn(think, label, candidate, at_exit), True
    update, end, follow = (rng.random() < rate for rate in (UPDATE_RATE, END_RATE, FOLLOW_RATE))
    return GateTurn(think, update, candidate, end), follow


def verdict(new: bool, complete: bool) -> str:
    """What ``<think>`` says: whether the chunk adds something, whether memory and chunk hold all that is asked."""
    return f"{'new' if new else 'nothing'} {'complete' if complete else 'incomplete'}"


def parse_verdict(think: str) -> tuple[bool, bool] | None:
    """``(new, complete)`` of a verdict; None where ``<think>`` says something else."""
    for new in (True, False):
        for complete in (True, False):
            if think == verdict(new, complete):
                return new, complete
    return None


def merge_memory(memory: str, note: str, protocol: GateProtocol) -> str:
    """The old memory and then the note, within ``memory_tokens``; the first memory says nothing and gives way."""
    if not note:
        return memory
    return protocol.cut_memory(note if memory == FIRST_MEMORY else f"{memory} {note}")[0].strip()


def evidence_note(task: ReadingTask, index: int, protocol: GateProtocol, share: int) -> str:
    """The sentence of chunk ``index`` that shares most with the answers and the question, at most ``share`` tokens.

    A task has one label a chunk and no spans, so the sentence is found by its words: one with an answer first, then
    the one with most words of the question; the earlier of equals.
    """
    answers = [answer.casefold() for answer in task.answers or ()]
    asked = set(_WORD.findall(task.question.casefold()))

    def rank(sentence: str) -> tuple[bool, int]:
        text = sentence.casefold()
        return any(answer in text for answer in answers), len(asked & set(_WORD.findall(text)))

    sentences = [text.strip() for text in _SENTENCE.findall(task.chunks[index]) if text.strip()]
    if not sentences:
        return ""
    best = max(sentences, key=rank)
    return cut_text(f"- {best}", share, protocol.codec)


def cut_text(text: str, tokens: int, codec: TextCodec) -> str:
    """The longest head of ``text``, in whole words, within ``tokens`` tokens."""
    if len(codec.encode_plain(text)) <= tokens:
        return text
    words = text.split(" ")
    while words and len(codec.encode_plain(" ".join(words))) > tokens:
        words.pop()
    return " ".join(words)


def _answer_pair(protocol: GateProtocol, prompt: tuple[int, ...], answer: str) -> list[TurnPair]:
    text = f"\\boxed{{{answer}}}"
    if parse_answer(text) != answer.strip():
        return []
    codec = protocol.codec
    return [(prompt, (*codec.encode_template("\\boxed{"), *codec.encode_plain(answer + "}"), codec.stop_ids[0]))]


def response_ids(text: str, codec: TextCodec) -> tuple[int, ...]:
    """Ids of a turn's response: the tags as template, what stands between them as plain text, then the end of turn."""
    ids: list[int] = []
    position = 0
    for match in _CONTENT.finditer(text):
        ids += codec.encode_template(text[position : match.start()])
        ids += codec.encode_plain(match.group())
        position = match.end()
    return (*ids, *codec.encode_template(text[position:]), codec.stop_ids[0])
