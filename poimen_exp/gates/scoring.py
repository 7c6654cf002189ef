"""From trajectories to scores, rows and advantages: the chain that training, validation and the gate check call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from poimen_exp.gates.advantages import mix_advantages, trajectory_advantages, turn_advantages
from poimen_exp.gates.outcome import Matcher, outcome
from poimen_exp.gates.rewards import OnUnparsed, TrajectoryScore, score_trajectory
from poimen_exp.gates.types import Trajectory

TurnBaseline = Literal["group_step", "batch_step"]
ANSWER_STEP = -1
"""Chunk index that answer rows carry in tensors."""


@dataclass(frozen=True)
class ScoredTrajectory:
    """A trajectory with its score and its place: ``group`` is the prompt, ``sample`` the rollout of that prompt."""

    trajectory: Trajectory
    score: TrajectoryScore
    group: int
    sample: int


@dataclass(frozen=True)
class GateRows:
    """One entry a row (a turn, answer turns included), in the order of the trajectories and their turns.

    Attributes:
        trajectory: [R] int64 index of the row's trajectory.
        group: [R] int64.
        step: [R] int64 chunk index; ``ANSWER_STEP`` for answer rows.
        valid: [R] bool; True where the row has an update reward.
        update_reward: [R] float32; 0 where not valid.
    """

    trajectory: Tensor
    group: Tensor
    step: Tensor
    valid: Tensor
    update_reward: Tensor


@dataclass(frozen=True)
class Advantages:
    """[R] mixed advantages, one number a row (all its response tokens share it), and the two terms they are made of."""

    mixed: Tensor
    trajectory: Tensor
    turn: Tensor


def score(trajectory: Trajectory, matcher: Matcher, on_unparsed: OnUnparsed) -> TrajectoryScore:
    """Score of one trajectory against the labels of its task."""
    task = trajectory.task
    read = trajectory.chunk_turns
    return score_trajectory(
        [turn.gate.update if turn.gate else None for turn in read],
        task.evidence[: len(read)],
        [turn.parsed for turn in trajectory.turns],
        trajectory.exit_index,
        task.exit.index,
        task.last_index,
        None if task.answers is None else outcome(trajectory.answer, task.answers, matcher),
        on_unparsed=on_unparsed,
        exit_known=task.exit.known,
    )


def gate_rows(scored: Sequence[ScoredTrajectory]) -> GateRows:
    """Rows of the trajectories, flattened."""
    place: list[tuple[int, int, int]] = []
    reward: list[float | None] = []
    for index, item in enumerate(scored):
        for turn in item.trajectory.turns:
            place.append((index, item.group, ANSWER_STEP if turn.chunk is None else turn.chunk))
            reward.append(None if turn.chunk is None else item.score.update[turn.chunk])
    columns = torch.tensor(place, dtype=torch.int64).reshape(-1, 3)
    return GateRows(
        trajectory=columns[:, 0],
        group=columns[:, 1],
        step=columns[:, 2],
        valid=torch.tensor([value is not None for value in reward], dtype=torch.bool),
        update_reward=torch.tensor([value or 0.0 for value in reward], dtype=torch.float32),
    )


def row_advantages(
    totals: Tensor, trajectory_group: Tensor, rows: GateRows, alpha: float, baseline: TurnBaseline
) -> Advantages:
    """Advantages of every row.

    Args:
        totals: [B] total rewards.
        trajectory_group: [B] int64 group of each trajectory.
        rows: the rows of these trajectories.
        baseline: ``group_step``: a turn is compared within its group at its chunk; ``batch_step``: with every turn of
            the batch at its chunk.
    """
    per_trajectory = trajectory_advantages(totals, trajectory_group)[rows.trajectory]
    group = rows.group if baseline == "group_step" else torch.zeros_like(rows.group)
    turn = turn_advantages(rows.update_reward, group, rows.step, rows.valid)
    return Advantages(mix_advantages(per_trajectory, turn, alpha), per_trajectory, turn)


def advantages_of(
    scored: Sequence[ScoredTrajectory], alpha: float, baseline: TurnBaseline
) -> tuple[GateRows, Advantages]:
    """Rows and advantages of scored trajectories; failed rollouts must not be among them."""
    rows = gate_rows(scored)
    totals = torch.tensor([item.score.total for item in scored], dtype=torch.float32)
    group = torch.tensor([item.group for item in scored], dtype=torch.int64)
    return rows, row_advantages(totals, group, rows, alpha, baseline)
