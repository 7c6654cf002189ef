"""The hand-worked half of the gate check: six readings of two tasks whose every number was computed on paper.

Task A has 4 chunks with labels (T, F, T, F), exit target 2 and the answer "red"; task B has labels (F, ?, T, F), exit
target 2 and no answers. What the readers do, with the update rewards in brackets:

    A1  yes, no, yes and end; "red"        [+1, +1, +1]       outcome 1, exit  0,    format 1: total 2
    A2  yes, yes and end; "blue"           [+1, -1]           outcome 0, exit -0.75, format 1: total 0.25
    A3  no, malformed, no, no; "red"       [-1, -1, -1, +1]   outcome 1, exit -0.5,  format 0: total 0
    B1  yes, no, yes and end               [-1, none, +1]     no outcome, exit 0,    format 1: total 1
    B2  no, yes and end                    [+1, none]         no outcome, exit -0.75, format 1: total 0.25
    B3  yes, malformed, yes and end        [-1, none, +1]     no outcome, exit 0,    format 0: total 0

Group means of the totals: A 0.75, B 5/12; over the whole batch 7/12, over the rows of A 35/48. Means of the update
rewards by (group, chunk): A 1/3, -1/3, 0, 1 (alone); B -1/3, none, 1 (a tie). By chunk over the batch: 0, -1/3, 1/2, 1.
The trajectories stand as B2, A3, B1, A1, B3, A2, under the group ids 3 (A) and 2 (B):
neighbours, so that adding chunk to group would mix their cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from poimen_exp.gates import advantages, metrics, protocol, rewards, scoring
from poimen_exp.gates.check_report import Recorder
from poimen_exp.gates.check_script import MALFORMED, answer_text, byte_protocol, play, turn_text
from poimen_exp.gates.scoring import GateRows, ScoredTrajectory, TurnBaseline
from poimen_exp.gates.types import ExitTarget, ReadingTask

_A = ReadingTask("A", "p", "q", ("red",), ("c0", "c1", "c2", "c3"), (True, False, True, False), ExitTarget(True, 2))
_B = ReadingTask("B", "p", "q", None, ("c0", "c1", "c2", "c3"), (False, None, True, False), ExitTarget(True, 2))
_YES, _NO, _YES_END = turn_text(True), turn_text(False), turn_text(True, end=True)
_RED, _BLUE = answer_text("red"), answer_text("blue")
READINGS: tuple[tuple[ReadingTask, int, tuple[str, ...]], ...] = (
    (_B, 2, (_NO, _YES_END, _RED)),  # B2
    (_A, 3, (_NO, MALFORMED, _NO, _NO, _RED)),  # A3
    (_B, 2, (_YES, _NO, _YES_END, _RED)),  # B1
    (_A, 3, (_YES, _NO, _YES_END, _RED)),  # A1
    (_B, 2, (_YES, MALFORMED, _YES_END, _RED)),  # B3
    (_A, 3, (_YES, _YES_END, _BLUE)),  # A2
)
_GROUP = (2, 3, 2, 3, 2, 3)
_TOTAL = (0.25, 0.0, 1.0, 2.0, 0.0, 0.25)
_TOTAL_ZERO_FORMAT = (0.25, 0.5, 1.0, 2.0, 0.0, 0.25)
_UPDATE = (1, None, -1, -1, -1, 1, -1, None, 1, 1, 1, 1, -1, None, 1, 1, -1)
_TRAJECTORY = (-1 / 6, -3 / 4, 7 / 12, 5 / 4, -5 / 12, -1 / 2)

_OF_ROW = (0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5)
_STEP = (0, 1, -1, 0, 1, 2, 3, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, -1)
_THIRD = 1 / 3
# fmt: off
_TURN: dict[TurnBaseline, tuple[float, ...]] = {
    "group_step": (
        4 * _THIRD, 0, 0,
        -4 * _THIRD, -2 * _THIRD, -1, 0, 0,
        -2 * _THIRD, 0, 0, 0,
        2 * _THIRD, 4 * _THIRD, 1, 0,
        -2 * _THIRD, 0, 0, 0,
        2 * _THIRD, -2 * _THIRD, 0,
    ),
    "batch_step": (
        1, 0, 0,
        -1, -2 * _THIRD, -1.5, 0, 0,
        -1, 0, 0.5, 0,
        1, 4 * _THIRD, 0.5, 0,
        -1, 0, 0.5, 0,
        1, -2 * _THIRD, 0,
    ),
}
MIXED_09: dict[TurnBaseline, tuple[float, ...]] = {  # 0.9 of the trajectory's, 0.1 of the turn's
    "group_step": (
        -0.0166667, -0.15, -0.15,
        -0.8083333, -0.7416667, -0.775, -0.675, -0.675,
        0.4583333, 0.525, 0.525, 0.525,
        1.1916667, 1.2583333, 1.225, 1.125,
        -0.4416667, -0.375, -0.375, -0.375,
        -0.3833333, -0.5166667, -0.45,
    ),
    "batch_step": (
        -0.05, -0.15, -0.15,
        -0.775, -0.7416667, -0.825, -0.675, -0.675,
        0.425, 0.525, 0.575, 0.525,
        1.225, 1.2583333, 1.175, 1.125,
        -0.475, -0.375, -0.325, -0.375,
        -0.35, -0.5166667, -0.45,
    ),
}
# fmt: on
_METRICS: dict[str, tuple[float, int]] = {
    "gates/update_accuracy/evidence_present": (5 / 7, 7),
    "gates/update_accuracy/evidence_free": (3 / 7, 7),
    "gates/update_rate": (9 / 17, 17),
    "gates/exit/exact": (3 / 6, 6),
    "gates/exit/early": (2 / 6, 6),
    "gates/exit/late": (1 / 6, 6),
    "gates/format_correct": (21 / 23, 23),
    "gates/chunks_read": (17 / 6, 6),
    "reward/total": (3.5 / 6, 6),
    "reward/outcome": (2 / 3, 3),
    "reward/exit": (-2 / 6, 6),
    "reward/format": (4 / 6, 6),
    "reward/update": (2 / 14, 14),
}
_ADVANTAGE_METRICS: dict[str, tuple[float, int]] = {
    "advantage/singletons": (1 / 8, 8),  # two groups and six cells; A3 stands alone at chunk 3
    "advantage/zero_trajectory_groups": (0.0, 2),
    "advantage/zero_turn_cells": (2 / 6, 6),  # A3 alone, and the tie of B at chunk 2
}


def check_fixture(out: Recorder) -> None:
    """Exact values of rewards, scores, both baselines, the mix and the metrics."""
    with out.section("rewards"):
        _check_rewards(out)
    with out.section("labels"):
        _check_exit_targets(out)
    with out.section("advantages"):
        _check_estimators(out)
    with out.section("fixture"):
        _check_scores(out)
    for baseline in _TURN:
        with out.section(f"fixture/{baseline}"):
            _check_chain(out, baseline)
    with out.section("metrics"):
        _check_metrics(out)


def fixture_batch() -> list[ScoredTrajectory]:
    """The six readings, played through the reading loop and scored."""
    codec = byte_protocol()
    scored = []
    for sample, (task, group, responses) in enumerate(READINGS):
        trajectory = play(task, codec, responses)
        value = scoring.score(trajectory, "exact", "zero_trajectory")
        scored.append(ScoredTrajectory(trajectory, value, group, sample))
    return scored


def _check_rewards(out: Recorder) -> None:
    update = rewards.update_reward
    labelled = [update(gate, label) for label in (True, False) for gate in (True, False, None)]
    out.equal("update_reward: yes, no, malformed on evidence, then on none", labelled, (1, -1, -1, -1, 1, -1))
    out.equal("update_reward: unknown label", [update(gate, None) for gate in (True, False, None)], (None,) * 3)
    bands = [rewards.exit_reward(index, 2, 4) for index in range(5)]
    out.equal("exit_reward: exits at 0 to 4, target 2", bands, (-0.75, -0.75, 0, -0.5, -0.5))
    never = [rewards.exit_reward(index, None, 2) for index in range(3)]
    out.equal("exit_reward: exits at 0 to 2, target never", never, (-0.75, -0.75, 0))
    forms = [rewards.format_reward(parsed) for parsed in ([True, True], [True, False], [False, True], [False])]
    out.equal("format_reward: all parsed, last not, first not, none", forms, (1, 0, 0, 0))
    out.equal("score_trajectory: outcome 1, exit -0.5, all parsed", _total(True, "zero_trajectory"), 1.5)
    out.equal("score_trajectory: one turn unparsed, zero_trajectory", _total(False, "zero_trajectory"), 0.0)
    out.equal("score_trajectory: one turn unparsed, zero_format", _total(False, "zero_format"), 0.5)
    unknown = rewards.score_trajectory([True], [None], [True, True], 0, None, 3, None, exit_known=False)
    out.equal("score_trajectory: no answers, unknown exit", (unknown.total, unknown.exit, unknown.outcome), (1, 0, 0))
    present = (float(unknown.has_exit), float(unknown.has_outcome))
    out.equal("score_trajectory: parts that exist without answers and exit", present, (0, 0))


def _total(last_parsed: bool, on_unparsed: rewards.OnUnparsed) -> float:
    gates, parsed = [True, False, False, False], [True, True, True, True, last_parsed]
    return rewards.score_trajectory(gates, [False] * 4, parsed, 3, 1, 3, 1.0, on_unparsed=on_unparsed).total


def _check_exit_targets(out: Recorder) -> None:
    from poimen_exp.corpus.labels import exit_target

    cases: tuple[tuple[tuple[bool | None, ...], int | None, float | None, str], ...] = (
        ((True, True, False), None, 1, "last evidence"),
        ((None, True), None, 1, "unlabelled chunk before the last evidence"),
        ((False, False), None, None, "never"),
        ((True, False, False), 1, 1, "given"),
    )
    for labels, given, expected, name in cases:
        target = exit_target(labels, given)
        out.equal(f"exit_target: {name}", (float(target.known), target.index), (1, expected))
    unknown = [float(exit_target(labels, None).known) for labels in ((True, None, False), (None, None))]
    out.equal("exit_target: known with an unlabelled chunk after the last evidence, without labels", unknown, (0, 0))


def _check_estimators(out: Recorder) -> None:
    totals, group = torch.tensor(_TOTAL), torch.tensor(_GROUP)
    out.equal("trajectory_advantages", _list(advantages.trajectory_advantages(totals, group)), _TRAJECTORY)
    alone = advantages.trajectory_advantages(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0, 1, 1]))
    out.equal("trajectory_advantages: a group of one", _list(alone), (0, 0.5, -0.5))
    place = torch.tensor([2, 0, 1])
    for alpha, expected in ((1.0, (1.0, -2.0, 3.0)), (0.0, (10.0, 20.0, -30.0)), (0.9, (1.9, 0.2, -0.3))):
        mixed = advantages.mix_advantages(
            torch.tensor([1.0, -2.0, 3.0])[place], torch.tensor([10.0, 20.0, -30.0])[place], alpha
        )
        tolerance = 1e-6 if alpha == 0.9 else 0.0
        out.equal(f"mix_advantages: alpha {alpha}", _list(mixed), [expected[i] for i in place], tolerance=tolerance)


def _check_scores(out: Recorder) -> None:
    batch = fixture_batch()
    out.equal("totals", [item.score.total for item in batch], _TOTAL)
    out.equal("update rewards", [value for item in batch for value in item.score.update], _UPDATE)
    lenient = [scoring.score(item.trajectory, "exact", "zero_format").total for item in batch]
    out.equal("totals under zero_format", lenient, _TOTAL_ZERO_FORMAT)
    unlabelled = dataclasses.replace(_A, exit=ExitTarget(known=False))
    hasty = scoring.score(play(unlabelled, byte_protocol(), (_YES, _YES_END, _BLUE)), "exact", "zero_trajectory")
    out.equal("A2 under an unknown exit target", (hasty.total, float(hasty.has_exit)), (1, 0))
    memory = [turn.memory == "m" for turn in batch[1].trajectory.turns + batch[0].trajectory.turns]
    out.equal("memory replaced: A3 never, B2 from its second turn", memory, (0, 0, 0, 0, 0, 0, 1, 1))
    out.words(
        "first memory is kept byte for byte",
        batch[1].trajectory.turns[-1].memory,
        protocol.FIRST_MEMORY,
        passed=batch[1].trajectory.turns[-1].memory == protocol.FIRST_MEMORY == "No previous memory",
    )


def _check_chain(out: Recorder, baseline: TurnBaseline) -> None:
    batch = fixture_batch()
    per_row = [_TRAJECTORY[owner] for owner in _OF_ROW]
    turn = _TURN[baseline]
    rows, found = scoring.advantages_of(batch, 0.9, baseline)
    out.equal("chunk index of every row", _list(rows.step), _STEP)
    out.equal("trajectory term of every row", _list(found.trajectory), per_row)
    out.equal("turn term of every row", _list(found.turn), turn)
    out.equal("mix at alpha 0.9", _list(found.mixed), MIXED_09[baseline])
    for alpha, pure in ((1.0, found.trajectory), (0.0, found.turn)):
        mixed = scoring.advantages_of(batch, alpha, baseline)[1].mixed
        out.equal(f"mix at alpha {alpha:g}, bit for bit", _list(mixed), _list(pure), tolerance=0.0)
        expected = per_row if alpha else turn
        out.equal(f"mix at alpha {alpha:g}", _list(mixed), expected)
    order = torch.tensor([(7 * place + 3) % len(_STEP) for place in range(len(_STEP))])  # 7 and 23 are coprime
    shuffled = GateRows(
        rows.trajectory[order], rows.group[order], rows.step[order], rows.valid[order], rows.update_reward[order]
    )
    again = scoring.row_advantages(torch.tensor(_TOTAL), torch.tensor(_GROUP), shuffled, 0.9, baseline).mixed
    out.equal("mix at alpha 0.9, rows shuffled", _list(again), [MIXED_09[baseline][place] for place in order])
    group = shuffled.group if baseline == "group_step" else torch.zeros_like(shuffled.group)
    alone = advantages.turn_advantages(shuffled.update_reward, group, shuffled.step, shuffled.valid)
    out.equal("turn_advantages, rows shuffled", _list(alone), [turn[place] for place in order])


def _check_metrics(out: Recorder) -> None:
    batch = fixture_batch()
    rows, found = scoring.advantages_of(batch, 0.9, "group_step")
    for means, expected in (
        (metrics.gate_metrics(batch), _METRICS),
        (metrics.advantage_metrics(batch, rows, found), _ADVANTAGE_METRICS),
    ):
        values = means.means()
        for name, (value, count) in expected.items():
            out.equal(f"{name} and its denominator", (values.get(name), means.counts.get(name)), (value, count))


def _list(values: torch.Tensor) -> Sequence[float]:
    return [float(value) for value in values.tolist()]
