"""Project logs made from a seed, with questions whose evidence lies in some chunks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from poimen_exp.gates.types import ExitTarget, ReadingTask
from poimen_exp.quickstart.words import ACTORS, DAYS, HOURS, PLACES, SERVICES, THINGS, UNKNOWN, VERBS

Kind = Literal["single", "double", "none"]
KINDS: dict[Kind, float] = {"single": 0.5, "double": 0.3, "none": 0.2}
"""Share of questions with evidence in one chunk, in two, in none."""

CHUNK_TOKENS = 64
"""``corpus.chunk_tokens`` under which a chunk of the shipped corpus holds ``Shape.entries_per_chunk`` lines."""

_TIMES = [f"{day} {hour}" for day in DAYS for hour in HOURS]
_PAIR = re.compile(r"the (\w+) (\w+)")
_LINE = re.compile(r"\w+ \w+ : \w+ \w+ the (\w+) (\w+) \w+ (\w+)")


@dataclass(frozen=True)
class Entry:
    """One line of a log: who put which thing of which service where."""

    time: str
    actor: str
    verb: tuple[str, str]
    service: str
    thing: str
    place: str

    @property
    def text(self) -> str:
        """The line; ten tokens of the tiny model."""
        verb, preposition = self.verb
        return f"{self.time} : {self.actor} {verb} the {self.service} {self.thing} {preposition} {self.place}"


@dataclass(frozen=True)
class LogQuestion:
    """A question about one log; ``evidence`` are indices of the lines that answer it, in the order they are read."""

    kind: Kind
    text: str
    answer: str
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class LogDocument:
    """One log and the questions about it. No (service, thing) pair has two lines."""

    entries: tuple[Entry, ...]
    questions: tuple[LogQuestion, ...]


@dataclass(frozen=True)
class Shape:
    """Sizes of the logs; ``chunks`` is an inclusive range. Fewer ``things`` make more lines that nearly match."""

    services: int = 3
    things: int = len(THINGS)
    entries_per_chunk: int = 5
    chunks: tuple[int, int] = (3, 6)
    questions: int = 8


def make_document(services: Sequence[str], shape: Shape, rng: random.Random) -> LogDocument:
    """A log about ``services`` and ``shape.questions`` different questions about it."""
    chunks = rng.randint(*shape.chunks)
    size = chunks * shape.entries_per_chunk
    things = rng.sample(THINGS, shape.things)
    pairs = [(service, thing) for service in services for thing in things]
    rng.shuffle(pairs)
    times = sorted(rng.randrange(len(_TIMES)) for _ in range(size))
    entries = tuple(
        Entry(_TIMES[time], rng.choice(ACTORS), rng.choice(VERBS), *pair, rng.choice(PLACES))
        for time, pair in zip(times, pairs, strict=False)
    )
    questions: dict[str, LogQuestion] = {}
    while len(questions) < shape.questions:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        question = _make_question(kind, entries, pairs[size:], chunks, rng)
        questions.setdefault(question.text, question)
    return LogDocument(entries, tuple(questions.values()))


def _make_question(
    kind: Kind, entries: tuple[Entry, ...], absent: list[tuple[str, str]], chunks: int, rng: random.Random
) -> LogQuestion:
    per_chunk = len(entries) // chunks
    if kind == "none":
        count = 2 if rng.random() < KINDS["double"] / (KINDS["single"] + KINDS["double"]) else 1
        return LogQuestion(kind, ask(rng.sample(absent, count)), UNKNOWN, ())
    if kind == "single":
        at = rng.choices(range(chunks), single_weights(chunks))
    else:
        at = sorted(rng.sample(range(chunks), 2))
    evidence = tuple(chunk * per_chunk + rng.randrange(per_chunk) for chunk in at)
    asked = [entries[i] for i in evidence]
    rng.shuffle(asked)
    text = ask([(entry.service, entry.thing) for entry in asked])
    return LogQuestion(kind, text, " ".join(entry.place for entry in asked), evidence)


def single_weights(chunks: int) -> list[float]:
    """Weight of each chunk for the evidence of a single-evidence question.

    Two chunks drawn for a double-evidence question make a late exit more likely than an early one. Earlier chunks
    for the single ones take half of that back; all of it would make early *evidence* too likely instead. Position
    then predicts neither label (AUROC within 0.45 and 0.55).
    """
    pairs = chunks * (chunks - 1) / 2
    single, double = KINDS["single"], KINDS["double"]
    flat_exit = [(single + double) / chunks - double * last / pairs for last in range(chunks)]
    return [0.5 * weight + 0.5 * single / chunks for weight in flat_exit]


def ask(pairs: Sequence[tuple[str, str]]) -> str:
    """The question about one or two (service, thing) pairs."""
    asked = " and ".join(f"the {service} {thing}" for service, thing in pairs)
    return f"where {'is' if len(pairs) == 1 else 'are'} {asked} ?"


def asked_pairs(question: str) -> list[tuple[str, str]]:
    """The (service, thing) pairs that a question made by ``ask`` asks for, in its order."""
    return [(service, thing) for service, thing in _PAIR.findall(question)]


def log_note(task: ReadingTask, index: int) -> str:
    """What chunk ``index`` adds to the memory of a question about a log: ``- mail cache cedar``; empty if nothing."""
    asked = asked_pairs(task.question)
    found = (match.groups() for match in _LINE.finditer(task.chunks[index]))
    return " ".join(f"- {service} {thing} {place}" for service, thing, place in found if (service, thing) in asked)


def reading_tasks(document: LogDocument, name: str, project: str, entries_per_chunk: int) -> list[ReadingTask]:
    """The document's questions as the corpus loader gives them, chunked by lines instead of by tokens."""
    lines = [entry.text for entry in document.entries]
    starts = range(0, len(lines), entries_per_chunk)
    chunks = tuple("\n".join(lines[start : start + entries_per_chunk]) for start in starts)
    return [
        _reading_task(question, f"{name}-{number}", project, chunks, entries_per_chunk)
        for number, question in enumerate(document.questions)
    ]


def _reading_task(
    question: LogQuestion, task_id: str, project: str, chunks: tuple[str, ...], entries_per_chunk: int
) -> ReadingTask:
    held = {i // entries_per_chunk for i in question.evidence}
    return ReadingTask(
        task_id=task_id,
        project=project,
        question=question.text,
        answers=(question.answer,),
        chunks=chunks,
        evidence=tuple(index in held for index in range(len(chunks))),
        exit=ExitTarget(True, max(held, default=None)),
    )


def sample_tasks(shape: Shape, rng: random.Random) -> Iterator[ReadingTask]:
    """Endless questions over endless logs, each log with services of its own: what the tiny model is trained on."""
    number = 0
    while True:
        document = make_document(rng.sample(SERVICES, shape.services), shape, rng)
        yield from reading_tasks(document, f"sample-{number}", "sample", shape.entries_per_chunk)
        number += 1
