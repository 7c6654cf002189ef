"""What the training loop asks of a task: rollouts with advantages, and a validation. The gates are one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from poimen_exp.gates.metrics import Means
from poimen_exp.solo.ragged import Ragged
from poimen_exp.solo.rows import Row
from poimen_exp.tracking.trajectories import RolloutRecord


@dataclass(frozen=True)
class Needs:
    """What a task must know of a batch before it can weigh it."""

    log_probs: bool = False
    ref_log_probs: bool = False
    values: bool = False


@dataclass(frozen=True)
class Measured:
    """What the roles say of a batch's response tokens; None where nobody asked."""

    log_probs: Ragged | None = None
    """By the trainer, before any optimizer step of this batch."""
    ref_log_probs: Ragged | None = None
    values: Ragged | None = None


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of one step; ``Task.weigh`` makes them ready to learn from.

    Attributes:
        rows: R rows; those of one prompt at one chunk stand together and know their shared prefix.
        names: one name a row, for messages ("task t7, sample 3, chunk 2").
        advantages: of every response token; empty until they are known.
        group: [R] int64 prompt of each row; mini-batches are whole groups.
        metrics: means of the batch, without a ``train/`` prefix.
        watch: means that only the collapse alarm looks at.
        attempted: rollouts started.
        failed: rollouts that did not finish; none of their rows is in the batch.
        records: one a rollout, for ``trajectories/``.
        scores: [R] what the reward gave each row; None where the task keeps that to itself.
        returns: the critic's targets; empty without one.
        named: metrics under their own names, as verl logs them, and ``counts`` their denominators.
        reward_s: seconds of the rollout that scoring took.
    """

    rows: tuple[Row, ...]
    names: tuple[str, ...]
    advantages: Ragged
    group: Tensor
    metrics: Means
    watch: Means
    attempted: int
    failed: int
    records: tuple[RolloutRecord, ...]
    scores: Tensor | None = None
    returns: Ragged = ()
    named: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    reward_s: float = 0.0


@dataclass(frozen=True)
class Validation:
    """One pass over the validation split; ``metrics`` has no ``val/`` prefix."""

    metrics: Means
    attempted: int
    failed: int
    records: tuple[RolloutRecord, ...]


class Task(Protocol):
    """Something that can be rolled out, scored and validated."""

    @property
    def train_size(self) -> int:
        """Number of training prompts."""
        ...

    @property
    def needs(self) -> Needs:
        """What ``weigh`` is to be told."""
        ...

    def rollout(self, prompts: Sequence[int], step: int) -> RolloutBatch:
        """``group_size`` rollouts of each prompt (indices into the training split), scored."""
        ...

    def weigh(self, batch: RolloutBatch, measured: Measured) -> RolloutBatch:
        """The batch with its advantages."""
        ...

    def validate(self, step: int) -> Validation:
        """Measures the current policy on the validation split."""
        ...
