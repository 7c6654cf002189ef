"""Reads a split with each reader and measures all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from poimen_exp.corpus.split import Side
from poimen_exp.evaluation.intervals import Estimate, estimate
from poimen_exp.evaluation.readers import Overrider, always_update, fit_position_rule, never_update, oracle
from poimen_exp.gates.metrics import gate_metrics
from poimen_exp.gates.scoring import ScoredTrajectory
from poimen_exp.gates.types import ReadingTask
from poimen_exp.solo.engine import TransformersEngine
from poimen_exp.solo.gate_task import GateTask
from poimen_exp.solo.policy import Policy, pick_device
from poimen_exp.solo.settings import SoloSettings
from poimen_exp.solo.setup import GateSetup
from poimen_exp.tracking.metric_names import denominator_of

SHOWN = (
    "reward/total",
    "reward/outcome",
    "gates/update_accuracy/evidence_present",
    "gates/update_accuracy/evidence_free",
    "gates/exit/exact",
    "gates/chunks_read",
    "gates/exit/early",
    "gates/exit/late",
    "gates/format_correct",
)
"""In the order of the tables: two and two, then four and four belong together."""


@dataclass(frozen=True)
class ReaderScores:
    """One reader on one split: every metric overall, and by project."""

    reader: str
    overall: Mapping[str, Estimate]
    by_project: Mapping[str, Mapping[str, Estimate]]
    failed: int


@dataclass(frozen=True)
class Evaluation:
    """All readers on one split."""

    split: str
    tasks: int
    projects: int
    samples: int
    matcher: str
    readers: tuple[ReaderScores, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def evaluate(
    settings: SoloSettings,
    setup: GateSetup,
    adapter: Path | None,
    split: Side,
    samples: int,
    say: Callable[[str], None],
) -> Evaluation:
    """Measures base, adapter, oracle, always-update, never-update and position-only on ``split``.

    The last four take the gates away from the model; the memory text and the answer stay the model's (the adapter's
    where there is one), so that outcomes show what right or wrong gates are worth to it.
    """
    tasks, train = list(setup.corpus.split(split)), setup.corpus.split("train")

    def reader(peft: Path | None) -> GateTask:
        device = pick_device(settings.device)
        policy = Policy(replace(settings.model, adapter=peft), device)
        engine = TransformersEngine(policy.sampler, setup.codec.stop_ids, setup.codec.pad_id, settings.rollout.max_rows)
        gates, rollout = settings.gates, settings.rollout
        return GateTask(train, tasks, setup.protocol, engine, gates, rollout, settings.alpha, settings.seed, device)

    def measure(name: str, model: GateTask, overrider: Overrider | None) -> ReaderScores:
        say(f"{split}: reading {len(tasks)} tasks x {samples} with {name}")
        override = [overrider(task) for task in tasks] if overrider else None
        scored, failed = model.read_groups(tasks, samples, settings.rollout.val, f"eval-{split}", 0, override)
        return _scores(name, scored, failed)

    model = reader(None)
    results = [measure("base", model, None)]
    if adapter is not None:
        model = reader(adapter)
        results.append(measure("adapter", model, None))
    frame: list[tuple[str, Overrider]] = [
        ("oracle gates", oracle),
        ("always update", always_update),
        ("never update", never_update),
        ("position only", fit_position_rule(train).reader),
    ]
    results += [measure(name, model, overrider) for name, overrider in frame]
    return Evaluation(
        split, len(tasks), len({task.project for task in tasks}), samples, settings.gates.matcher, tuple(results)
    )


def _scores(name: str, scored: Sequence[ScoredTrajectory], failed: int) -> ReaderScores:
    by_project: dict[str, list[ScoredTrajectory]] = {}
    for item in scored:
        by_project.setdefault(item.trajectory.task.project, []).append(item)
    return ReaderScores(
        name,
        _estimates(scored),
        {project: _estimates(items) for project, items in sorted(by_project.items())},
        failed,
    )


def _estimates(scored: Sequence[ScoredTrajectory]) -> dict[str, Estimate]:
    values: dict[str, list[float]] = {}
    projects: dict[str, list[str]] = {}
    tasks: dict[str, list[str]] = {}
    for item in scored:  # metrics of one trajectory at a time keep the same definitions, and each value's owner
        means = gate_metrics([item])
        for metric, mean in means.means().items():
            count = means.counts[metric]
            values.setdefault(metric, []).extend([mean] * count)
            projects.setdefault(metric, []).extend([_task(item).project] * count)
            tasks.setdefault(metric, []).extend([_task(item).task_id] * count)
    found = {
        metric: estimate(values[metric], projects[metric], tasks[metric], denominator_of(f"val/{metric}") or "")
        for metric in values
    }
    return {metric: value for metric, value in found.items() if value is not None}


def _task(item: ScoredTrajectory) -> ReadingTask:
    return item.trajectory.task
