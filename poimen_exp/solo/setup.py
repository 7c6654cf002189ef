"""What a gate run reads before it starts: tokenizer, protocol, corpus. What can be refused is refused here."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from poimen_exp.adapters.manifest import AdapterInfo
from poimen_exp.config.schema import MISSING_CORPUS
from poimen_exp.corpus import Corpus, open_corpus
from poimen_exp.corpus.manifest import require_corpus
from poimen_exp.corpus.split import Side
from poimen_exp.errors import Refused
from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.gates.types import ReadingTask
from poimen_exp.solo.engines import Engine
from poimen_exp.solo.gate_task import GateTask
from poimen_exp.solo.policy import Policy, load_codec
from poimen_exp.solo.seeds import stream_seed
from poimen_exp.solo.settings import CorpusSettings, GateSettings, ModelSettings, SoloSettings
from poimen_exp.solo.task import Task
from poimen_exp.solo.verdicts import verdict_accuracy
from poimen_exp.solo.warm_start import warm_start
from poimen_exp.wording import counted


@dataclass(frozen=True)
class Prepared:
    """A new run before its first step.

    Attributes:
        reference: adapter weights that KL is measured against.
        metrics, counts: of what was done to the policy so far; they go into the run's first record.
    """

    reference: Mapping[str, Tensor]
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class GateSetup:
    """Tokenizer, protocol and corpus of a run."""

    codec: HfCodec
    protocol: GateProtocol
    corpus: Corpus

    @property
    def train_size(self) -> int:
        """Number of training tasks."""
        return len(self.corpus.split("train"))

    def identity(self, settings: SoloSettings) -> dict[str, str]:
        """What must not change between the parts of one run, beside model and seed."""
        return {"corpus": self.corpus.sha256} | task_identity(settings)

    def prepare(self, settings: SoloSettings, policy: Policy, say: Callable[[str], None]) -> Prepared:
        """Warm start of a new run; the adapter weights that KL is measured against: where the run began."""
        train, budget, pad_id = self.corpus.split("train"), settings.step.micro_batch_tokens, self.codec.pad_id
        report = warm_start(policy, self.protocol, train, settings.gates, pad_id, budget, settings.seed, say)
        if report is None:
            return Prepared(policy.state())
        assert settings.corpus is not None
        held_out = self.val_tasks(settings.corpus.max_val_tasks)
        rng = random.Random(stream_seed(settings.seed, "verdict_tasks"))
        seen = [train[place] for place in rng.sample(range(len(train)), min(len(train), len(held_out)))]
        metrics, counts = report.metrics(), dict[str, int]()
        sides: tuple[tuple[Side, str, Sequence[ReadingTask]], ...] = (
            ("train", "training", seen),
            ("val", "validation", held_out),
        )
        for side, shown, tasks in sides:
            found = verdict_accuracy(policy, self.protocol, tasks, pad_id, budget, settings.seed)
            say(f"warm start: on {shown} chunks the verdict before the gates is right on {found.line()}")
            values, denominators = found.metrics(side)
            metrics, counts = metrics | values, counts | denominators
        return Prepared(policy.state(), metrics, counts)

    def task(self, settings: SoloSettings, engine: Engine, device: torch.device) -> Task:
        """The readings of a run."""
        assert settings.corpus is not None
        return GateTask(
            self.corpus.split("train"),
            self.val_tasks(settings.corpus.max_val_tasks),
            self.protocol,
            engine,
            settings.gates,
            settings.rollout,
            settings.alpha,
            settings.seed,
            device,
        )

    def adapter_info(self, settings: SoloSettings, run_id: str, step: int, metrics: Mapping[str, float]) -> AdapterInfo:
        """What the adapter's manifest says."""
        assert settings.corpus is not None
        return AdapterInfo(
            base_model=settings.model.path,
            dtype=settings.model.dtype,
            layout=settings.gates.layout,
            wording=settings.gates.wording,
            memory_tokens=settings.gates.memory_tokens,
            chunk_tokens=settings.corpus.chunk_tokens,
            response_tokens=settings.rollout.val.max_tokens,
            corpus_id=self.corpus.corpus_id,
            corpus_sha256=self.corpus.sha256,
            label_status=self.corpus.label_status,
            run_id=run_id,
            step=step,
            metrics=metrics,
        )

    def val_tasks(self, most: int | None) -> Sequence[ReadingTask]:
        """Validation tasks: all, or the first ``most`` by the hash of their id (the same for every seed)."""
        split = self.corpus.split("val")
        ids = [(hashlib.sha256(task.task_id.encode()).digest(), place) for place, task in enumerate(split)]
        chosen = sorted(place for _, place in sorted(ids)[: most if most is not None else len(ids)])
        return [split[place] for place in chosen]


class Setup(Protocol):
    """What a run has read before it starts: ``GateSetup`` or ``prompt_setup.PromptSetup``."""

    @property
    def codec(self) -> HfCodec: ...

    @property
    def train_size(self) -> int: ...

    def identity(self, settings: SoloSettings) -> dict[str, str]: ...

    def prepare(self, settings: SoloSettings, policy: Policy, say: Callable[[str], None]) -> Prepared: ...

    def task(self, settings: SoloSettings, engine: Engine, device: torch.device) -> Task: ...

    def adapter_info(
        self, settings: SoloSettings, run_id: str, step: int, metrics: Mapping[str, float]
    ) -> AdapterInfo: ...


def gate_setup(
    model: ModelSettings, gates: GateSettings, corpus: CorpusSettings | None, max_prompt_length: int
) -> GateSetup:
    """Opens model folder and corpus.

    Args:
        corpus: None where the run has none: it trains on prompts.

    Raises:
        Refused: a model folder that is not one, a corpus that breaks its contract, a task that does not fit.
    """
    if corpus is None:
        raise Refused(f"{MISSING_CORPUS} (a run of single-turn prompts has no gates)")
    require_corpus(corpus.path)
    require_model_folder(model.path)
    codec = load_codec(model.path)
    protocol = GateProtocol(codec, gates.layout, gates.wording, gates.memory_tokens)
    fixed = protocol.turn_overhead() + gates.memory_tokens

    def prompt_tokens(question: str, chunk: str) -> int:
        return fixed + len(codec.encode_plain(question)) + len(codec.encode_plain(chunk))

    return GateSetup(codec, protocol, open_corpus(corpus, codec, prompt_tokens, max_prompt_length))


def task_identity(settings: SoloSettings) -> dict[str, str]:
    """What of the task must not change between the parts of one run and stands in its settings."""
    if settings.corpus is not None:
        return {"alpha": repr(settings.alpha)}
    return {"algorithm": repr(settings.algorithm)}


def require_full_batch(settings: SoloSettings, tasks: int) -> None:
    """Refuses a training split that has fewer tasks than a batch."""
    if tasks < settings.step.train_batch_size:
        raise Refused(
            f"data.train_batch_size={settings.step.train_batch_size}: the training split has {counted(tasks, 'task')}; "
            "expected at least one full batch"
        )


def require_model_folder(path: Path) -> None:
    """Refuses a path that does not hold a Hugging Face model."""
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise Refused(
                f"actor_rollout_ref.model.path={path}: no {name} there; expected a folder with a Hugging Face model "
                "(try +experiment=quickstart for one that ships)"
            )
