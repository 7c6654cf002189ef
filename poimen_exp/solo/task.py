"""What the training loop asks of a task: rollouts with advantages, and a validation. The gates are one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from poimen_exp.gates.metrics import Means
from poimen_exp.solo.rows import Row
from poimen_exp.tracking.trajectories import RolloutRecord


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of one step, ready to learn from.

    Attributes:
        rows: R rows; those of one prompt at one chunk stand together and know their shared prefix.
        names: one name a row, for messages ("task t7, sample 3, chunk 2").
        advantages: [R] float32, one number a row: all its response tokens share it.
        group: [R] int64 prompt of each row; mini-batches are whole groups.
        metrics: means of the batch, without a ``train/`` prefix.
        watch: means that only the collapse alarm looks at.
        attempted: rollouts started.
        failed: rollouts that did not finish; none of their rows is in the batch.
        records: one a rollout, for ``trajectories/``.
    """

    rows: tuple[Row, ...]
    names: tuple[str, ...]
    advantages: Tensor
    group: Tensor
    metrics: Means
    watch: Means
    attempted: int
    failed: int
    records: tuple[RolloutRecord, ...]


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

    def rollout(self, prompts: Sequence[int], step: int) -> RolloutBatch:
        """``group_size`` rollouts of each prompt (indices into the training split), scored, with advantages."""
        ...

    def validate(self, step: int) -> Validation:
        """Measures the current policy on the validation split."""
        ...
