"""One-line faults in the code that turns readings into gradients: the gate check must refuse each of them.

Every fault is written into a copy of the package, which is imported in place of the real one for the length of a check.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faulty_package import copy_with, package_at

from poimen_exp.gates.check_step import import_engines

pytestmark = pytest.mark.usefixtures("engines")


@dataclass(frozen=True)
class Fault:
    """A replacement in one file. ``part`` begins the name of a check that must refuse it."""

    name: str
    file: str
    old: str
    new: str
    part: str


REWARDS = "gates/rewards.py"
ADVANTAGES = "gates/advantages.py"
SCORING = "gates/scoring.py"
METRICS = "gates/metrics.py"
FAULTS = (
    Fault(
        "update sign",
        REWARDS,
        "UPDATE_MATCH, UPDATE_MISMATCH = 1.0, -1.0",
        "UPDATE_MATCH, UPDATE_MISMATCH = -1.0, 1.0",
        "rewards/update_reward",
    ),
    Fault(
        "malformed turn rewarded",
        REWARDS,
        "gate is not None and gate == evidence",
        "gate is None or gate == evidence",
        "rewards/update_reward",
    ),
    Fault(
        "unknown label punished",
        REWARDS,
        "if evidence is None:\n        return None",
        "if evidence is None:\n        return UPDATE_MISMATCH",
        "rewards/update_reward: unknown",
    ),
    Fault(
        "bands swapped",
        REWARDS,
        "EXIT_EXACT, EXIT_EARLY, EXIT_LATE = 0.0, -0.75, -0.5",
        "EXIT_EXACT, EXIT_EARLY, EXIT_LATE = 0.0, -0.5, -0.75",
        "rewards/exit_reward",
    ),
    Fault(
        "early and late swapped",
        REWARDS,
        "EXIT_EARLY if exit_index < wanted",
        "EXIT_EARLY if exit_index > wanted",
        "corpus/exit",
    ),
    Fault(
        "never means at once",
        REWARDS,
        "last_index if target is None else target",
        "0 if target is None else target",
        "rewards/exit_reward",
    ),
    Fault("format inverted", REWARDS, "FORMAT_OK if all(parsed)", "FORMAT_OK if not all(parsed)", "corpus/format"),
    Fault("any parsed turn", REWARDS, "FORMAT_OK if all(parsed)", "FORMAT_OK if any(parsed)", "rewards/format_reward"),
    Fault(
        "update reward leaks into the total",
        REWARDS,
        "total = outcome_part + exit_part + form\n",
        "total = outcome_part + exit_part + form + sum(v or 0 for v in map(update_reward, gates, evidence))\n",
        "corpus/total",
    ),
    Fault(
        "unparsed turns keep the total",
        REWARDS,
        'on_unparsed == "zero_trajectory":\n        total = 0.0',
        'on_unparsed == "zero_trajectory":\n        total = total',
        "fixture/totals",
    ),
    Fault(
        "trajectory baseline over the whole batch",
        ADVANTAGES,
        "_minus_cell_mean(rewards, group,",
        "_minus_cell_mean(rewards, torch.zeros_like(group),",
        "advantages/trajectory_advantages",
    ),
    Fault(
        "turn baseline over the whole batch",
        ADVANTAGES,
        "cell = group * (step.max() + 2) + step",
        "cell = torch.zeros_like(step)",
        "fixture/group_step",
    ),
    Fault(
        "turn baseline ignores the group",
        ADVANTAGES,
        "cell = group * (step.max() + 2) + step",
        "cell = step",
        "fixture/group_step",
    ),
    Fault(
        "turn baseline ignores the chunk",
        ADVANTAGES,
        "cell = group * (step.max() + 2) + step",
        "cell = group",
        "fixture/batch_step",
    ),
    Fault(
        "group and chunk index confused",
        ADVANTAGES,
        "cell = group * (step.max() + 2) + step",
        "cell = group + step",
        "fixture/group_step",
    ),
    Fault(
        "alpha and 1 - alpha swapped",
        ADVANTAGES,
        "alpha * trajectory + (1.0 - alpha) * turn",
        "alpha * turn + (1.0 - alpha) * trajectory",
        "corpus/advantage",
    ),
    Fault(
        "pure terms swapped",
        ADVANTAGES,
        "if alpha == 1.0:\n        return trajectory.clone()",
        "if alpha == 1.0:\n        return turn.clone()",
        "advantages/mix_advantages: alpha 1",
    ),
    Fault("no baseline", ADVANTAGES, "kept - mean[index]", "kept", "advantages/trajectory_advantages"),
    Fault("advantage sign", ADVANTAGES, "kept - mean[index]", "mean[index] - kept", "corpus/advantage"),
    Fault(
        "mean over n - 1",
        ADVANTAGES,
        "count.clamp(min=1.0)",
        "(count - 1).clamp(min=1.0)",
        "advantages/trajectory_advantages",
    ),
    Fault(
        "unlabelled rows in the mean",
        ADVANTAGES,
        "index_add_(0, index, valid.double())",
        "index_add_(0, index, torch.ones_like(kept))",
        "fixture/batch_step",
    ),
    Fault(
        "labels inverted",
        SCORING,
        "task.evidence[: len(read)],",
        "[label if label is None else not label for label in task.evidence[: len(read)]],",
        "corpus/update",
    ),
    Fault(
        "trajectory baseline over rows",
        SCORING,
        "trajectory_advantages(totals, trajectory_group)[rows.trajectory]",
        "trajectory_advantages(totals[rows.trajectory], rows.group)",
        "fixture/group_step",
    ),
    Fault(
        "rows misaligned",
        SCORING,
        "trajectory_advantages(totals, trajectory_group)[rows.trajectory]",
        "trajectory_advantages(totals, trajectory_group)[rows.trajectory.roll(1)]",
        "fixture/group_step",
    ),
    Fault(
        "turns compared within their own trajectory",
        SCORING,
        "turn_advantages(rows.update_reward, group,",
        "turn_advantages(rows.update_reward, rows.trajectory,",
        "fixture/group_step",
    ),
    Fault(
        "baselines swapped",
        SCORING,
        'rows.group if baseline == "group_step"',
        'rows.group if baseline == "batch_step"',
        "fixture/batch_step",
    ),
    Fault(
        "answer rows get a turn term",
        SCORING,
        "None if turn.chunk is None else item.score.update[turn.chunk]",
        "item.score.update[turn.chunk or 0]",
        "fixture/batch_step",
    ),
    Fault("outcome dropped", SCORING, "outcome(trajectory.answer, task.answers, matcher)", "None", "corpus/total"),
    Fault(
        "unknown exit taken for never",
        SCORING,
        "exit_known=task.exit.known",
        "exit_known=True",
        "fixture/A2 under an unknown exit",
    ),
    Fault(
        "no overwrites the memory",
        "gates/reading.py",
        "if gate is not None and gate.update:",
        "if gate is not None:",
        "fixture/memory",
    ),
    Fault(
        "end is not obeyed",
        "gates/reading.py",
        "if gate is not None and gate.end:",
        "if gate is None:",
        "corpus/exit",
    ),
    Fault(
        "exit index off by one",
        "gates/reading.py",
        "exit_index = len(turns) - 1",
        "exit_index = len(turns)",
        "corpus/exit",
    ),
    Fault("check inverted", "gates/protocol.py", 'match["check"] == "yes"', 'match["check"] == "no"', "corpus/update"),
    Fault("next inverted", "gates/protocol.py", 'match["next"] == "end"', 'match["next"] != "end"', "fixture/"),
    Fault(
        "worst accepted answer",
        "gates/outcome.py",
        "return max((_agreement",
        "return min((_agreement",
        "corpus/outcome",
    ),
    Fault(
        "oracle exit off by one",
        "evaluation/readers.py",
        "else index == task.exit.index",
        "else index + 1 == task.exit.index",
        "corpus/exit",
    ),
    Fault(
        "exit target off by one",
        "corpus/labels.py",
        "return ExitTarget(known=True, index=last_true)",
        "return ExitTarget(known=True, index=last_true and last_true - 1)",
        "labels/exit_target",
    ),
    Fault(
        "accuracies swapped",
        METRICS,
        "'evidence_present' if label else 'evidence_free'",
        "'evidence_free' if label else 'evidence_present'",
        "metrics/gates/update_accuracy",
    ),
    Fault(
        "early and late swapped in the metrics",
        METRICS,
        '"gates/exit/early", [trajectory.exit_index < target]',
        '"gates/exit/early", [trajectory.exit_index > target]',
        "metrics/gates/exit/early",
    ),
    Fault(
        "advantages in another order than rows",
        "solo/gate_task.py",
        "spread(advantages.mixed[order], ordered)",
        "spread(advantages.mixed, ordered)",
        "rollout/",
    ),
    Fault("loss sign", "solo/losses.py", "total = pg_loss\n", "total = -pg_loss\n", "step/token-mean: rewarded"),
    Fault("gradient sign", "solo/update.py", "loss.backward()", "(-loss).backward()", "step/token-mean: rewarded"),
    Fault(
        "mask shifted by one",
        "solo/losses.py",
        "mask = batch.mask.float()",
        "mask = batch.mask.float().roll(1, 1)",
        "step/largest error",
    ),
    Fault(
        "padding in the loss",
        "solo/losses.py",
        "mask = batch.mask.float()",
        "mask = torch.ones_like(batch.log_probs)",
        "loss/10 tokens",
    ),
    Fault(
        "denominator of the micro-batch",
        "solo/losses.py",
        '"batch_num_tokens": size.tokens',
        '"batch_num_tokens": int(batch.mask.sum())',
        "loss/the same in two micro-batches",
    ),
    Fault(
        "log-probs shifted by one",
        "solo/forward.py",
        "+ 1) + column",
        "+ 1) + column + 1",
        "log_probs/of every",
    ),
    Fault(
        "temperature ignored",
        "solo/fused.py",
        "scaled = part.float() / temperature",
        "scaled = part.float()",
        "log_probs/of every",
    ),
    Fault(
        "temperature ignored in the gradient",
        "solo/fused.py",
        "part.float() / ctx.temperature",
        "part.float()",
        "step/largest error",
    ),
    Fault(
        "sign of the log-prob's gradient",
        "solo/fused.py",
        "* -part_grad[:, None]",
        "* part_grad[:, None]",
        "step/largest error",
    ),
    Fault(
        "responses padded on the left",
        "solo/rows.py",
        "pad_right([row.response",
        "pad_left([row.response",
        "log_probs/of every",
    ),
    Fault(
        "advantages of other rows",
        "solo/update.py",
        "at(batch.advantages, places,",
        "at(batch.advantages, places[::-1],",
        "step/largest error",
    ),
    Fault(
        "one optimizer step a group",
        "solo/update.py",
        "range(0, train_batch_size, mini_batch_size)",
        "range(0, train_batch_size)",
        "step/optimizer steps",
    ),
)


@pytest.fixture(scope="module")
def engines() -> None:
    with warnings.catch_warnings():  # of verl's imports
        warnings.simplefilter("ignore")
        import_engines()


def _check() -> Any:
    """The gate check on a corpus with early and late targets, "never", unknown labels and two accepted answers."""
    check, types = (importlib.import_module(f"poimen_exp.gates.{name}") for name in ("check", "types"))
    labels = (
        (True, False, False),
        (False, True, False),
        (False, None, True),
        (False, False, False),
        (True, None, None),
    )
    exits = (types.ExitTarget(True, 0), types.ExitTarget(True, 1), types.ExitTarget(True, 2))
    exits = (*exits, types.ExitTarget(True, None), types.ExitTarget(False))
    tasks = [
        types.ReadingTask(f"t{i}", "p", "q", ("red", "crimson"), ("a", "b", "c"), labels[i % 5], exits[i % 5])
        for i in range(10)
    ]
    return check.run_gate_check(tasks)


def test_an_untouched_copy_passes(tmp_path: Path) -> None:
    with package_at(copy_with(tmp_path)):
        check = importlib.import_module("poimen_exp.gates.check")
        assert check.__file__ is not None
        assert Path(check.__file__).is_relative_to(tmp_path)
        report = _check()
    assert [found.line() for found in report.failed] == []
    assert len(report.checks) > 80
    assert report.seconds < 30  # under 2 s on an idle machine; libraries are loaded before the clock starts


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_the_gate_check_refuses(fault: Fault, tmp_path: Path) -> None:
    with package_at(copy_with(tmp_path, fault.file, fault.old, fault.new)):
        report = _check()
        check = importlib.import_module("poimen_exp.gates.check")
        with pytest.raises(check.GateCheckFailed, match="gate check: ") as refusal:
            report.require()
    assert refusal.value.exit_code == 2
    assert fault.part in [found.name[: len(fault.part)] for found in report.failed], str(refusal.value)
    for found in report.failed:
        assert found.line() in str(refusal.value)
