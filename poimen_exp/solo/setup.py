"""What a gate run reads before it starts: tokenizer, protocol, corpus. What can be refused is refused here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from poimen_exp.corpus import Corpus, open_corpus
from poimen_exp.errors import Refused
from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.gates.types import ReadingTask
from poimen_exp.solo.policy import load_codec
from poimen_exp.solo.settings import CorpusSettings, GateSettings, ModelSettings


@dataclass(frozen=True)
class GateSetup:
    """Tokenizer, protocol and corpus of a run."""

    codec: HfCodec
    protocol: GateProtocol
    corpus: Corpus

    def val_tasks(self, most: int | None) -> Sequence[ReadingTask]:
        """Validation tasks: all, or the first ``most`` by the hash of their id (the same for every seed)."""
        split = self.corpus.split("val")
        ids = [(hashlib.sha256(task.task_id.encode()).digest(), place) for place, task in enumerate(split)]
        chosen = sorted(place for _, place in sorted(ids)[: most if most is not None else len(ids)])
        return [split[place] for place in chosen]


def gate_setup(model: ModelSettings, gates: GateSettings, corpus: CorpusSettings, max_prompt_length: int) -> GateSetup:
    """Opens model folder and corpus.

    Raises:
        Refused: a model folder that is not one, a corpus that breaks its contract, a task that does not fit.
    """
    require_model_folder(model.path)
    codec = load_codec(model.path)
    protocol = GateProtocol(codec, gates.layout, gates.wording, gates.memory_tokens)
    fixed = protocol.turn_overhead() + gates.memory_tokens

    def prompt_tokens(question: str, chunk: str) -> int:
        return fixed + len(codec.encode_plain(question)) + len(codec.encode_plain(chunk))

    return GateSetup(codec, protocol, open_corpus(corpus, codec, prompt_tokens, max_prompt_length))


def require_model_folder(path: Path) -> None:
    """Refuses a path that does not hold a Hugging Face model."""
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise Refused(
                f"actor_rollout_ref.model.path={path}: no {name} there; expected a folder with a Hugging Face model "
                "(try +experiment=quickstart for one that ships)"
            )
