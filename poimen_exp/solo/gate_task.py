"""The gates as a task of the training loop: readings in, rows with two-baseline advantages out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from poimen_exp.corpus import TaskSet
from poimen_exp.gates import scoring
from poimen_exp.gates.metrics import Means, advantage_metrics, gate_metrics
from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.gates.reading import GateOverride, read
from poimen_exp.gates.scoring import Advantages, GateRows, ScoredTrajectory
from poimen_exp.gates.types import FailedRollout, ReadingTask, Sampling
from poimen_exp.solo.drive import Answer, ask, drive
from poimen_exp.solo.engine import Request
from poimen_exp.solo.engines import Engine
from poimen_exp.solo.ragged import spread
from poimen_exp.solo.rows import Row
from poimen_exp.solo.seeds import stream
from poimen_exp.solo.settings import GateSettings, RolloutSettings
from poimen_exp.solo.task import Measured, Needs, RolloutBatch, Validation
from poimen_exp.tracking.trajectories import RolloutRecord, TurnRecord


class GateTask:
    """Reads the tasks of a corpus with the current policy.

    Args:
        train: training split; the test split never comes here.
        val: tasks of a validation.
        device: of the engine, where random numbers are drawn.
    """

    def __init__(
        self,
        train: TaskSet,
        val: Sequence[ReadingTask],
        protocol: GateProtocol,
        engine: Engine,
        gates: GateSettings,
        rollout: RolloutSettings,
        alpha: float,
        seed: int,
        device: torch.device,
    ) -> None:
        self._train, self._val, self._protocol, self._engine = train, val, protocol, engine
        self._gates, self._rollout, self._alpha = gates, rollout, alpha
        self._seed, self._device = seed, device

    @property
    def train_size(self) -> int:
        """Number of training tasks."""
        return len(self._train)

    def rollout(self, prompts: Sequence[int], step: int) -> RolloutBatch:
        """``group_size`` readings of each training task; the group of a task is its place in ``prompts``."""
        tasks = [self._train[prompt] for prompt in prompts]
        scored, failed = self.read_groups(tasks, self._rollout.group_size, self._rollout.train, "rollout", step)
        rows, advantages = scoring.advantages_of(scored, self._alpha, self._gates.turn_baseline)
        signal = advantage_metrics(scored, rows, advantages)
        order = _by_group_and_step(rows)
        flat = [turn for item in scored for turn in item.trajectory.turns]
        owner = rows.trajectory.tolist()
        ordered = tuple(
            Row(flat[place].prompt, flat[place].generation.ids, flat[place].generation.log_probs) for place in order
        )
        return RolloutBatch(
            rows=ordered,
            names=tuple(_name(scored[owner[place]], flat[place].chunk) for place in order),
            advantages=spread(advantages.mixed[order], ordered),
            group=rows.group[order],
            metrics=gate_metrics(scored),
            watch=collapse_watch(scored),
            attempted=len(tasks) * self._rollout.group_size,
            failed=failed,
            records=rollout_records(scored, advantages, step),
            named=signal.means(),
            counts=signal.counts,
        )

    @property
    def needs(self) -> Needs:
        """Nothing: the two baselines are of rewards alone."""
        return Needs()

    def weigh(self, batch: RolloutBatch, measured: Measured) -> RolloutBatch:  # noqa: ARG002
        """The batch as it is: its advantages came with it."""
        return batch

    def validate(self, step: int) -> Validation:
        """Readings of the validation tasks, with the same random numbers at every step."""
        scored, failed = self.read_groups(self._val, self._rollout.val_group_size, self._rollout.val, "val", 0)
        attempted = len(self._val) * self._rollout.val_group_size
        return Validation(gate_metrics(scored), attempted, failed, rollout_records(scored, None, step))

    def read_groups(
        self,
        tasks: Sequence[ReadingTask],
        group_size: int,
        sampling: Sampling,
        phase: str,
        step: int,
        override: Sequence[GateOverride] | None = None,
    ) -> tuple[list[ScoredTrajectory], int]:
        """Scored readings of every task, and the number of readings that failed.

        Args:
            override: one a task, for readers whose gates are not the model's.
        """
        generator = stream(self._seed, phase, step, device=self._device)

        def serve(requests: Mapping[int, Request], answer: Answer) -> None:
            self._engine.serve(requests, answer, generator)

        places = [(group, sample) for group in range(len(tasks)) for sample in range(group_size)]
        readings = [
            (tasks[group], read(tasks[group], self._protocol, ask, sampling, override[group] if override else None))
            for group, _ in places
        ]
        scored, failed = [], 0
        for (group, sample), result in zip(places, drive(readings, serve), strict=True):
            if isinstance(result, FailedRollout):
                failed += 1
                continue
            score = scoring.score(result, self._gates.matcher, self._gates.on_unparsed)
            scored.append(ScoredTrajectory(result, score, group, sample))
        return scored, failed


def _by_group_and_step(rows: GateRows) -> torch.Tensor:
    """Order of rows that puts those of one (group, chunk) together, answers last in their group."""
    last = int(rows.step.max()) + 1 if rows.step.numel() else 0
    step = torch.where(rows.step == scoring.ANSWER_STEP, last, rows.step)
    return torch.argsort(rows.group * (last + 1) + step, stable=True)


def collapse_watch(scored: Sequence[ScoredTrajectory]) -> Means:
    """What the collapse alarm looks at: ``updated`` of turns, ``ended`` and ``exit_at_once`` of trajectories."""
    out = Means()
    for item in scored:
        read_turns, task = item.trajectory.chunk_turns, item.trajectory.task
        out.add("updated", (turn.gate is not None and turn.gate.update for turn in read_turns))
        out.add("ended", [any(turn.gate is not None and turn.gate.end for turn in read_turns)])
        early = task.exit.known and item.trajectory.exit_index < (
            task.last_index if task.exit.index is None else task.exit.index
        )
        out.add("exit_at_once", [early and item.trajectory.exit_index < 0.05 * len(task.chunks)])
    return out


def _name(item: ScoredTrajectory, chunk: int | None) -> str:
    place = "answer" if chunk is None else f"chunk {chunk}"
    return f"task {item.trajectory.task.task_id}, sample {item.sample}, {place}"


def rollout_records(
    scored: Sequence[ScoredTrajectory], advantages: Advantages | None, step: int
) -> tuple[RolloutRecord, ...]:
    """Records of a step's readings; ``advantages`` is None for a validation, whose policy has made ``step`` updates."""
    records, start = [], 0
    for item in scored:
        end = start + len(item.trajectory.turns)
        records.append(_record(item, advantages, slice(start, end), step))
        start = end
    return tuple(records)


def _record(item: ScoredTrajectory, advantages: Advantages | None, rows: slice, step: int) -> RolloutRecord:
    score, trajectory = item.score, item.trajectory
    parts = {"total": score.total, "format": score.format}
    if score.has_outcome:
        parts["outcome"] = score.outcome
    if score.has_exit:
        parts["exit"] = score.exit
    return RolloutRecord(
        step=step,
        policy_version=step if advantages is None else step - 1,
        group=item.group,
        sample=item.sample,
        task_id=trajectory.task.task_id,
        turns=_turn_records(item, None if advantages is None else advantages.mixed[rows].tolist()),
        answer=trajectory.answer,
        exit_index=trajectory.exit_index,
        rewards={name: value for name, value in parts.items() if math.isfinite(value)},
    )


def _turn_records(item: ScoredTrajectory, advantages: list[float] | None) -> tuple[TurnRecord, ...]:
    out = []
    for place, turn in enumerate(item.trajectory.turns):
        chunk = turn.chunk
        out.append(
            TurnRecord(
                chunk=chunk,
                label=None if chunk is None else item.trajectory.task.evidence[chunk],
                update=None if turn.gate is None else turn.gate.update,
                end=None if turn.gate is None else turn.gate.end,
                prompt_tokens=len(turn.prompt.ids),
                response_ids=turn.generation.ids,
                log_probs=turn.generation.log_probs,
                text=turn.text,
                update_reward=None if chunk is None else item.score.update[chunk],
                advantage=None if advantages is None else _number(advantages[place]),
            )
        )
    return tuple(out)


def _number(value: float) -> float | None:
    """None for NaN and infinity, which stand in the message of the skipped step and not in the records."""
    return value if math.isfinite(value) else None
