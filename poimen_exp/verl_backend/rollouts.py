"""Rollouts of a step as lines of ``trajectories/step_N.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence

from poimen_exp.gates.scoring import Advantages, ScoredTrajectory
from poimen_exp.solo.gate_task import rollout_records
from poimen_exp.tracking.tracker import Tracker
from poimen_exp.tracking.trajectories import write_trajectories


def write_rollouts(tracker: Tracker, step: int, scored: Sequence[ScoredTrajectory], advantages: Advantages) -> None:
    """Writes them where ``tracking.trajectory_freq`` asks for this step."""
    every = tracker.settings.trajectory_freq
    if every and step % every == 0:
        write_trajectories(tracker.folder.trajectory_file(step), rollout_records(scored, advantages, step))


def write_validation(tracker: Tracker, step: int, scored: Sequence[ScoredTrajectory]) -> None:
    """Writes the readings of a validation to ``val_N.jsonl`` beside them."""
    write_trajectories(tracker.folder.trajectories / f"val_{step}.jsonl", rollout_records(scored, None, step))
