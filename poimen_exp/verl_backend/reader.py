"""The corpus and the protocol, opened once a process: verl makes a new agent loop for every rollout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.gates.types import ReadingTask
from poimen_exp.verl_backend.settings import ReaderSettings

if TYPE_CHECKING:
    from poimen_exp.corpus import Corpus

Split = Literal["train", "val"]
"""Training never opens the test split."""


@dataclass(frozen=True)
class Reader:
    """What it takes to read a task."""

    protocol: GateProtocol
    corpus: Corpus

    def task(self, split: Split, index: int) -> ReadingTask:
        """A task by its place in its split: rows carry the place, not the text."""
        task: ReadingTask = self.corpus.split(split)[index]
        return task


@lru_cache(maxsize=1)
def open_reader(settings: ReaderSettings) -> Reader:
    """Reader of these settings; the same one for every later call in this process."""
    from poimen_exp.corpus import open_corpus
    from poimen_exp.solo.policy import load_codec

    codec = load_codec(settings.model_path)
    gates = settings.gates
    protocol = GateProtocol(codec, gates.layout, gates.wording, gates.memory_tokens)

    def prompt_tokens(question: str, chunk: str) -> int:
        text = len(codec.encode_plain(question)) + len(codec.encode_plain(chunk))
        return protocol.turn_overhead() + text + gates.memory_tokens

    return Reader(protocol, open_corpus(settings.corpus, codec, prompt_tokens, settings.max_prompt_length))
