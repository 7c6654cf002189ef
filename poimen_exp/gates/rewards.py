"""Rewards of one trajectory (spec M5.5; GRU-Mem section 3.2). The signs here are what the gate check proves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

OnUnparsed = Literal["zero_trajectory", "zero_format"]

UPDATE_MATCH, UPDATE_MISMATCH = 1.0, -1.0
EXIT_EXACT, EXIT_EARLY, EXIT_LATE = 0.0, -0.75, -0.5
FORMAT_OK, FORMAT_BROKEN = 1.0, 0.0


@dataclass(frozen=True)
class TrajectoryScore:
    """Parts and total of one trajectory.

    Attributes:
        total: ``outcome + exit + format`` as it enters the advantage; the update rewards are never in it.
        outcome: 0 where the corpus has no answers (then ``has_outcome`` is False and the part is in no metric).
        exit: 0 where the exit target is unknown (then ``has_exit`` is False and the part is in no metric).
        update: one reward a chunk turn; None where the chunk is not labelled.
    """

    total: float
    outcome: float
    exit: float
    format: float
    update: tuple[float | None, ...]
    has_outcome: bool
    has_exit: bool


def update_reward(gate: bool | None, evidence: bool | None) -> float | None:
    """+1 if the update gate equals the label, -1 if not or if the turn is malformed (None); None without a label."""
    if evidence is None:
        return None
    return UPDATE_MATCH if gate is not None and gate == evidence else UPDATE_MISMATCH


def exit_reward(exit_index: int, target: int | None, last_index: int) -> float:
    """0 for the exact exit, -0.75 before it, -0.5 after it.

    Args:
        exit_index: last chunk that was read, also when ``end`` never came.
        target: chunk of the last evidence; None is "never": exact only if everything was read.
        last_index: index of the document's last chunk.
    """
    wanted = last_index if target is None else target
    if exit_index == wanted:
        return EXIT_EXACT
    return EXIT_EARLY if exit_index < wanted else EXIT_LATE


def format_reward(parsed: Sequence[bool]) -> float:
    """1 if every turn (the answer turn too) parsed, else 0."""
    return FORMAT_OK if all(parsed) else FORMAT_BROKEN


def score_trajectory(
    gates: Sequence[bool | None],
    evidence: Sequence[bool | None],
    parsed: Sequence[bool],
    exit_index: int,
    target: int | None,
    last_index: int,
    outcome: float | None,
    *,
    on_unparsed: OnUnparsed = "zero_trajectory",
    exit_known: bool = True,
) -> TrajectoryScore:
    """Scores one trajectory.

    Args:
        gates: update gate of every chunk turn; None where the turn did not parse.
        evidence: label of every chunk that was read (same length).
        parsed: of every turn, the answer turn included.
        target: as in ``exit_reward``; ignored if ``exit_known`` is False.
        outcome: in [0, 1]; None where the corpus has no answers.
        on_unparsed: ``zero_trajectory``: any unparsed turn makes the total 0; ``zero_format``: only the format part.

    Raises:
        ValueError: lengths that do not fit.
    """
    if len(gates) != len(evidence):
        raise ValueError(f"one label per gate: got {len(gates)} gates and {len(evidence)} labels")
    if not parsed:
        raise ValueError("a trajectory has at least its answer turn: got no turns")
    form = format_reward(parsed)
    exit_part = exit_reward(exit_index, target, last_index) if exit_known else 0.0
    outcome_part = 0.0 if outcome is None else outcome
    total = outcome_part + exit_part + form
    if form == FORMAT_BROKEN and on_unparsed == "zero_trajectory":
        total = 0.0
    return TrajectoryScore(
        total=total,
        outcome=outcome_part,
        exit=exit_part,
        format=form,
        update=tuple(update_reward(gate, label) for gate, label in zip(gates, evidence, strict=True)),
        has_outcome=outcome is not None,
        has_exit=exit_known,
    )
