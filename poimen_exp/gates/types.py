"""What travels between the corpus, the reading loop and the trainers."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class ExitTarget:
    """The chunk at which reading should stop.

    ``known`` False: the labels do not say (no exit reward, absent from the metrics). ``index`` None: "never", right
    only if every chunk was read.
    """

    known: bool
    index: int | None = None


@dataclass(frozen=True)
class ReadingTask:
    """One question over one chunked history (a ``"type": "trajectory"`` record of a corpus).

    Attributes:
        evidence: one label a chunk; None where the chunk was not labelled.
        answers: accepted answers; None where the corpus has none, which leaves the outcome out.
        source: ``file:line`` of the record, for messages.
    """

    task_id: str
    project: str
    question: str
    answers: tuple[str, ...] | None
    chunks: tuple[str, ...]
    evidence: tuple[bool | None, ...]
    exit: ExitTarget
    source: str = ""

    @property
    def last_index(self) -> int:
        """Index of the last chunk."""
        return len(self.chunks) - 1


@dataclass(frozen=True)
class Prompt:
    """Token ids of one turn's prompt.

    ``shared`` counts the leading ids that every rollout of this task has in common at this chunk (question and
    chunk under ``chunk_first``): engines prefill them once a group.
    """

    ids: tuple[int, ...]
    shared: int


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` -1 and ``top_p`` 1.0 switch those filters off."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True)
class Generation:
    """Sampled ids (the end-of-turn token included where it was sampled) and the log-prob of each.

    Log-probs are those of the sampling temperature before top-p and top-k, as verl has them. ``clipped``: the length
    limit came before an end-of-turn token.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    clipped: bool


class Generate(Protocol):
    """The one thing the reading loop asks of an engine."""

    def __call__(self, prompt: Prompt, sampling: Sampling) -> Awaitable[Generation]: ...


@dataclass(frozen=True)
class GateTurn:
    """A parsed response: the two gates and the candidate memory."""

    think: str
    update: bool
    candidate: str
    end: bool


@dataclass(frozen=True)
class Turn:
    """One prompt and its response.

    ``chunk`` is None for the answer turn. ``gate`` is None where the response did not parse (and for the answer turn).
    ``parsed`` says whether the response had the form its kind of turn asks for.
    """

    chunk: int | None
    prompt: Prompt
    generation: Generation
    text: str
    gate: GateTurn | None
    parsed: bool
    memory: str
    """Memory after this turn."""
    memory_tokens: int

    @property
    def kind(self) -> Literal["chunk", "answer"]:
        """Which of the two prompts this turn had."""
        return "answer" if self.chunk is None else "chunk"


@dataclass(frozen=True)
class Trajectory:
    """One reading of one task: the chunk turns in order, then the answer turn."""

    task: ReadingTask
    turns: tuple[Turn, ...]
    exit_index: int
    """Index of the last chunk read, also when ``end`` never came."""
    answer: str | None
    """Text inside the last ``\\boxed{}`` of the answer turn; None where there is none."""

    @property
    def chunk_turns(self) -> tuple[Turn, ...]:
        """The turns that read a chunk."""
        return tuple(turn for turn in self.turns if turn.chunk is not None)


@dataclass(frozen=True)
class FailedRollout:
    """A rollout that an engine could not finish: counted, and in no baseline, loss or mean."""

    task: ReadingTask
    reason: str
