"""The training loop: roll out, learn, sync, validate, record, save; until it converges, collapses or is done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from poimen_exp.errors import RunFailed
from poimen_exp.gates.metrics import Means
from poimen_exp.solo.checkpoint import Progress, TrainState, prune_checkpoints, save_checkpoint
from poimen_exp.solo.policy import Policy
from poimen_exp.solo.seeds import prompts_of_step
from poimen_exp.solo.settings import SoloSettings
from poimen_exp.solo.task import RolloutBatch, Task
from poimen_exp.solo.update import Updater, UpdateReport
from poimen_exp.tracking.result import OBJECTIVE, Status
from poimen_exp.tracking.tracker import Tracker

_SKIPS_IN_A_ROW = 3
_SKIPPED_SHARE = 0.1


@dataclass
class Loop:
    """A run in progress. ``train`` takes it from where ``progress`` stands to its end."""

    settings: SoloSettings
    task: Task
    policy: Policy
    updater: Updater
    reference: Mapping[str, torch.Tensor]
    identity: Mapping[str, str]
    tracker: Tracker
    say: Callable[[str], None]
    progress: Progress

    def train(self) -> Status:
        """Runs to the last step, or to convergence.

        Raises:
            RunFailed: too many failed rollouts, too many skipped optimizer steps, or a collapse that is to stop it.
        """
        trainer = self.settings.trainer
        if self.progress.step == 0 and self.progress.best_step is None:
            self._start()
        while self.progress.step < trainer.total_training_steps:
            if self._converged():
                self.say(
                    f"converged: no better {OBJECTIVE} in {self.progress.bad_validations} validations; "
                    f"best {self.progress.best_value:.4f} at step {self.progress.best_step}"
                )
                return "converged"
            self._step()
        return "completed"

    def _start(self) -> None:
        if self.settings.trainer.val_before_train:
            clock = _Clock()
            metrics, counts = self._validate(clock)
            self.tracker.log(0, {**metrics, **clock.metrics()}, counts)
        self._save()

    def _step(self) -> None:
        step, clock, settings = self.progress.step + 1, _Clock(), self.settings
        with clock("step"):
            with clock("gen"):
                batch = self.task.rollout(self._prompts(step), step)
            self._check_failed(batch)
            with clock("update_actor"):
                report = self.updater.update(batch)
            with clock("update_weights"):
                self.policy.sync()
        self._count(step, batch, report)
        metrics, counts = _train_metrics(batch, report)
        validated = step % settings.trainer.test_freq == 0 if settings.trainer.test_freq > 0 else False
        if validated or (step == settings.trainer.total_training_steps and settings.trainer.test_freq > 0):
            more, more_counts = self._validate(clock)
            metrics |= more
            counts |= more_counts
        metrics |= clock.metrics() | _throughput(batch, clock)
        self.tracker.write_trajectories(step, batch.records)
        self.tracker.log(step, metrics, counts)
        self._check_skips(report)
        self._check_collapse(batch)
        if self._due(step):
            self._save()

    def _prompts(self, step: int) -> list[int]:
        settings = self.settings.step
        return prompts_of_step(
            self.task.train_size, settings.train_batch_size, self.settings.seed, step, settings.shuffle
        )

    def _count(self, step: int, batch: RolloutBatch, report: UpdateReport) -> None:
        skipped = len(report.skipped)
        in_a_row = 0 if report.taken else self.progress.skipped_in_a_row + skipped
        self.progress = replace(
            self.progress,
            step=step,
            optimizer_steps=self.progress.optimizer_steps + report.taken,
            skipped=self.progress.skipped + skipped,
            skipped_in_a_row=in_a_row,
            groups=self.progress.groups + self.settings.step.train_batch_size,
            samples=self.progress.samples + batch.attempted,
        )

    def _validate(self, clock: _Clock) -> tuple[dict[str, float], dict[str, int]]:
        with clock("testing"):
            result = self.task.validate(self.progress.step)
        self.tracker.write_trajectories(self.progress.step, result.records, "val")
        metrics, counts = result.metrics.prefixed("val/")
        metrics["val/rollout/failed"], counts["val/rollout/failed"] = float(result.failed), result.attempted
        value = metrics.get(OBJECTIVE)
        if value is None:
            raise RunFailed(
                f"validation at step {self.progress.step}: every rollout failed, so {OBJECTIVE} does not exist"
            )
        self.progress = self.progress.validated(value, self.settings.trainer.min_delta)
        return metrics, counts

    def _due(self, step: int) -> bool:
        trainer = self.settings.trainer
        every = trainer.save_freq > 0 and step % trainer.save_freq == 0
        return every or step == trainer.total_training_steps or self.progress.best_step == step

    def _save(self) -> None:
        state = TrainState(
            adapter=self.policy.state(),
            reference=self.reference,
            optimizer=self.updater.optimizer.state_dict(),
            schedule=self.updater.schedule.state_dict(),
            identity=self.identity,
        )
        save_checkpoint(self.tracker.folder, self.progress, state, self.tracker.metrics_bytes)
        prune_checkpoints(self.tracker.folder, self.settings.trainer.max_ckpt_to_keep, self.progress.best_step)

    def _converged(self) -> bool:
        patience = self.settings.trainer.patience
        return patience is not None and self.progress.bad_validations >= patience

    def _check_failed(self, batch: RolloutBatch) -> None:
        share = batch.failed / batch.attempted
        if share > self.settings.rollout.max_failed or batch.failed == batch.attempted:
            raise RunFailed(
                f"step {self.progress.step + 1}: {batch.failed} of {batch.attempted} rollouts failed, "
                f"above rollout.max_failed={self.settings.rollout.max_failed}"
            )

    def _check_skips(self, report: UpdateReport) -> None:
        for reason in report.skipped:
            self.say(f"step {self.progress.step}: optimizer step skipped: {reason}")
        settings = self.settings.step
        per_step = settings.ppo_epochs * settings.train_batch_size // settings.ppo_mini_batch_size
        planned = per_step * self.settings.trainer.total_training_steps
        allowed = max(_SKIPS_IN_A_ROW - 1, math.floor(_SKIPPED_SHARE * planned))
        if self.progress.skipped_in_a_row >= _SKIPS_IN_A_ROW or self.progress.skipped > allowed:
            raise RunFailed(
                f"step {self.progress.step}: {self.progress.skipped_in_a_row} optimizer steps in a row and "
                f"{self.progress.skipped} of {planned} in all were skipped; the last: {report.skipped[-1:]}"
            )

    def _check_collapse(self, batch: RolloutBatch) -> None:
        alarm = collapse_alarm(batch.watch)
        if alarm is None:
            return
        self.say(f"step {self.progress.step}: collapse alarm: {alarm}")
        if self.settings.trainer.on_collapse == "stop":
            raise RunFailed(f"step {self.progress.step}: stopped by stop.on_collapse: {alarm}")


def collapse_alarm(watch: Means) -> str | None:
    """Why the gates look collapsed: they open for everything and never exit, or nearly always exit at once, too early.

    Args:
        watch: shares called ``updated`` (of turns), ``ended`` and ``exit_at_once`` (of trajectories).
    """
    means, counts = watch.means(), watch.counts
    if means.get("updated", 0.0) > 0.9 and means.get("ended") == 0.0:
        return (
            f"{means['updated']:.0%} of {counts['updated']} turns update and none of {counts['ended']} readings exits"
        )
    if means.get("exit_at_once", 0.0) > 0.9:
        share, count = means["exit_at_once"], counts["exit_at_once"]
        return f"{share:.0%} of {count} readings exit too early, in the first 5 % of their chunks"
    return None


class _Clock:
    """Seconds of a step's phases, under verl's names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = time.perf_counter() - begun

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


def _train_metrics(batch: RolloutBatch, report: UpdateReport) -> tuple[dict[str, float], dict[str, int]]:
    shared = Means()
    own = Means()
    for name, total in batch.metrics.totals.items():
        side = own if name.startswith("advantage/") else shared
        side.totals[name], side.counts[name] = total, batch.metrics.counts[name]
    metrics, counts = shared.prefixed("train/")
    metrics |= own.means() | dict(report.metrics)
    counts |= own.counts
    metrics["train/rollout/failed"] = float(batch.failed)
    counts["train/rollout/failed"] = batch.attempted
    metrics["update/skipped"] = float(len(report.skipped))
    counts["update/skipped"] = report.taken + len(report.skipped)
    return metrics, counts


def _throughput(batch: RolloutBatch, clock: _Clock) -> dict[str, Any]:
    """Tokens of the step as verl counts them: prompts (shared ones once a row) and responses, over the step's time."""
    tokens = sum(len(row.prompt.ids) + len(row.response) for row in batch.rows)
    sampled = sum(len(row.response) for row in batch.rows)
    seconds = clock.seconds
    metrics = {
        "perf/total_num_tokens": float(tokens),
        "perf/throughput": tokens / seconds["step"],
        "perf/rollout_tokens_per_s": sampled / seconds["gen"],
        "perf/update_tokens_per_s": tokens / seconds["update_actor"],
    }
    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics
