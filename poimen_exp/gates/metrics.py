"""Metrics of a set of scored trajectories: every mean with its denominator (design: names are a contract)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from poimen_exp.gates.scoring import Advantages, GateRows, ScoredTrajectory

GATE_METRICS = (
    "gates/update_accuracy/evidence_present",
    "gates/update_accuracy/evidence_free",
    "gates/update_rate",
    "gates/exit/exact",
    "gates/exit/early",
    "gates/exit/late",
    "gates/format_correct",
    "gates/memory_tokens",
    "gates/chunks_read",
    "reward/total",
    "reward/outcome",
    "reward/exit",
    "reward/format",
    "reward/update",
    "response_length/mean",
    "response_length/clipped",
)
ADVANTAGE_METRICS = (
    "advantage/singletons",
    "advantage/zero_trajectory_groups",
    "advantage/zero_turn_cells",
)


@dataclass
class Means:
    """Sums and denominators under metric names; a name whose denominator is 0 does not exist."""

    totals: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, values: Iterable[float]) -> None:
        """Takes more values into the mean called ``name``; NaN and infinity are no measurements and stay out."""
        listed = [float(value) for value in values if math.isfinite(value)]
        if listed:
            self.totals[name] = self.totals.get(name, 0.0) + sum(listed)
            self.counts[name] = self.counts.get(name, 0) + len(listed)

    def merge(self, other: Means) -> None:
        """Takes every sum and denominator of ``other``."""
        for name, total in other.totals.items():
            self.totals[name] = self.totals.get(name, 0.0) + total
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]

    def means(self) -> dict[str, float]:
        """Mean of every name."""
        return {name: total / self.counts[name] for name, total in self.totals.items()}

    def prefixed(self, prefix: str) -> tuple[dict[str, float], dict[str, int]]:
        """Means and denominators with ``prefix`` before every name."""
        return (
            {prefix + name: value for name, value in self.means().items()},
            {prefix + name: count for name, count in self.counts.items()},
        )


def gate_metrics(scored: Sequence[ScoredTrajectory]) -> Means:
    """Accuracies by evidence, exits, format, lengths and rewards. Denominators: labelled turns for the accuracies,
    trajectories with a known target for the exits, turns (answers included) for format and response lengths, chunk
    turns for update rate and memory, trajectories for the rest.
    """
    out = Means()
    for item in scored:
        _add_gates(out, item)
        _add_rewards(out, item)
        turns = item.trajectory.turns
        out.add("response_length/mean", (len(turn.generation.ids) for turn in turns))
        out.add("response_length/clipped", (turn.generation.clipped for turn in turns))
    return out


def _add_gates(out: Means, item: ScoredTrajectory) -> None:
    trajectory, task = item.trajectory, item.trajectory.task
    read = trajectory.chunk_turns
    for turn, label in zip(read, task.evidence, strict=False):  # chunks after the exit were not read
        right = turn.gate is not None and turn.gate.update == label
        if label is not None:
            out.add(f"gates/update_accuracy/{'evidence_present' if label else 'evidence_free'}", [right])
    out.add("gates/update_rate", (turn.gate is not None and turn.gate.update for turn in read))
    out.add("gates/memory_tokens", (turn.memory_tokens for turn in read))
    out.add("gates/format_correct", (turn.parsed for turn in trajectory.turns))
    out.add("gates/chunks_read", [len(read)])
    if task.exit.known:
        target = task.last_index if task.exit.index is None else task.exit.index
        out.add("gates/exit/exact", [trajectory.exit_index == target])
        out.add("gates/exit/early", [trajectory.exit_index < target])
        out.add("gates/exit/late", [trajectory.exit_index > target])


def _add_rewards(out: Means, item: ScoredTrajectory) -> None:
    score = item.score
    out.add("reward/total", [score.total])
    out.add("reward/format", [score.format])
    out.add("reward/update", (value for value in score.update if value is not None))
    if score.has_outcome:
        out.add("reward/outcome", [score.outcome])
    if score.has_exit:
        out.add("reward/exit", [score.exit])


def advantage_metrics(scored: Sequence[ScoredTrajectory], rows: GateRows, advantages: Advantages) -> Means:
    """Where the batch has no signal: groups and (group, chunk) cells of one, groups whose trajectories tie, cells that
    tie. The denominator of ``singletons`` counts groups and cells together.
    """
    out = Means()
    by_group: dict[int, list[float]] = {}
    for item in scored:
        by_group.setdefault(item.group, []).append(item.score.total)
    out.add("advantage/singletons", (len(totals) == 1 for totals in by_group.values()))
    out.add("advantage/zero_trajectory_groups", (min(totals) == max(totals) for totals in by_group.values()))
    if rows.valid.any():
        cells = torch.stack([rows.group, rows.step], 1)[rows.valid]
        ids, index, size = torch.unique(cells, dim=0, return_inverse=True, return_counts=True)
        out.add("advantage/singletons", (size == 1).tolist())
        peak = torch.zeros(len(ids)).scatter_reduce_(0, index, advantages.turn[rows.valid].abs().float(), "amax")
        out.add("advantage/zero_turn_cells", (peak == 0).tolist())
    return out
