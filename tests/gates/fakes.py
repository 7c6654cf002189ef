"""Scripted readers, a byte codec and small tasks, for tests that need no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from poimen_exp.gates import scoring
from poimen_exp.gates.check_script import STOP_ID, ByteCodec, Script, answer_text, byte_protocol, play, turn_text
from poimen_exp.gates.outcome import Matcher
from poimen_exp.gates.protocol import GateProtocol, Layout, Wording
from poimen_exp.gates.rewards import OnUnparsed
from poimen_exp.gates.scoring import ScoredTrajectory
from poimen_exp.gates.types import ExitTarget, ReadingTask, Trajectory

__all__ = [
    "STOP_ID",
    "ByteCodec",
    "Script",
    "answer_text",
    "byte_protocol",
    "play",
    "protocol",
    "scored",
    "task",
    "turn_text",
]


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def hf_tokenizer() -> Any:
    """A Qwen-shaped tokenizer of 256 bytes, the merge ``th`` and three special tokens (ids 0, 1, 2)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *alphabet, "th"]
    inner = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, [("t", "h")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    made.chat_template = CHAT
    return made


def task(
    evidence: Sequence[bool | None] = (False, True, False),
    exit_index: int | None = 1,
    answers: tuple[str, ...] | None = ("red",),
    *,
    exit_known: bool = True,
    name: str = "t",
) -> ReadingTask:
    """A task whose chunks are called c0, c1, ..."""
    chunks = tuple(f"c{place}" for place in range(len(evidence)))
    target = ExitTarget(exit_known, exit_index if exit_known else None)
    return ReadingTask(name, "p", "what colour?", answers, chunks, tuple(evidence), target, source=f"a.jsonl:{name}")


def protocol(layout: Layout = "chunk_first", wording: Wording = "terse", memory_tokens: int = 64) -> GateProtocol:
    return GateProtocol(ByteCodec(), layout, wording, memory_tokens)


def scored(
    of: ReadingTask,
    responses: Iterable[str],
    group: int = 0,
    sample: int = 0,
    matcher: Matcher = "exact",
    on_unparsed: OnUnparsed = "zero_trajectory",
) -> ScoredTrajectory:
    """The reading of a script, with its score."""
    trajectory: Trajectory = play(of, byte_protocol(), responses)
    return ScoredTrajectory(trajectory, scoring.score(trajectory, matcher, on_unparsed), group, sample)
