"""The training loop: roll out, learn, sync, validate, record, save; until it converges, collapses or is done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from poimen_exp.errors import RunFailed
from poimen_exp.gates.metrics import Means
from poimen_exp.solo.checkpoint import Progress, Trained, TrainState, prune_checkpoints, save_checkpoint
from poimen_exp.solo.critic import Critic
from poimen_exp.solo.engines import Engine
from poimen_exp.solo.policy import Policy
from poimen_exp.solo.rewards import RewardFailed
from poimen_exp.solo.seeds import prompts_of_step
from poimen_exp.solo.settings import SoloSettings
from poimen_exp.solo.task import Measured, RolloutBatch, Task
from poimen_exp.solo.update import Updater, UpdateReport, joined
from poimen_exp.tracking.result import OBJECTIVE, Status
from poimen_exp.tracking.tracker import Tracker

_SKIPS_IN_A_ROW = 3
_SKIPPED_SHARE = 0.1


@dataclass
class Loop:
    """A run in progress. ``train`` takes it from where ``progress`` stands to its end.

    Roles take turns on one device: actor (``policy`` samples, ``updater`` trains it), reference (the same base under
    other adapter weights), critic (None but for gae); the reward is the task's. Those that are offloaded come for their
    phases only.
    """

    settings: SoloSettings
    task: Task
    policy: Policy
    updater: Updater
    engine: Engine
    reference: Mapping[str, torch.Tensor]
    identity: Mapping[str, str]
    tracker: Tracker
    say: Callable[[str], None]
    progress: Progress
    critic: Critic | None = None
    opening: tuple[Mapping[str, float], Mapping[str, int]] = ({}, {})
    """Metrics and counts of what came before the first step; logged with its first record."""

    def train(self) -> Status:
        """Runs to the last step, or to convergence.

        Raises:
            RunFailed: too many failed rollouts, too many skipped optimizer steps, or a collapse that is to stop it.
        """
        trainer = self.settings.trainer
        if self.progress.step == self.progress.first_step and self.progress.best_step is None:
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
            self._log(self.progress.step, metrics | clock.metrics(), counts)
        self._save()

    def _log(self, step: int, metrics: dict[str, float], counts: dict[str, int]) -> None:
        self.tracker.log(step, metrics | dict(self.opening[0]), counts | dict(self.opening[1]))
        self.opening = ({}, {})

    def _step(self) -> None:
        step, clock, settings = self.progress.step + 1, _Clock(), self.settings
        with clock("step"):
            with clock("gen"):
                batch = self._rollout(step)
                self.engine.sleep()
            self._check_failed(batch)
            measured = self._measure(batch, clock)
            with clock("adv"):
                batch = self.task.weigh(batch, measured)
            report = self._learn(step, batch, measured, clock)
            with clock("update_weights"):
                self.engine.sync()
        self._count(step, batch, report)
        metrics, counts = _train_metrics(batch, report)
        validated = step % settings.trainer.test_freq == 0 if settings.trainer.test_freq > 0 else False
        if validated or (step == settings.trainer.total_training_steps and settings.trainer.test_freq > 0):
            more, more_counts = self._validate(clock)
            metrics |= more
            counts |= more_counts
        clock.split("gen", "reward", batch.reward_s)
        metrics |= clock.metrics() | _throughput(batch, clock)
        self.tracker.write_trajectories(step, batch.records)
        self._log(step, metrics, counts)
        self._check_skips(report)
        self._check_collapse(batch)
        if self._due(step):
            self._save()

    def _rollout(self, step: int) -> RolloutBatch:
        try:
            return self.task.rollout(self._prompts(step), step)
        except RewardFailed as error:  # the responses that could not be scored are kept
            self.tracker.write_trajectories(step, error.records)
            raise

    def _measure(self, batch: RolloutBatch, clock: _Clock) -> Measured:
        """Old and reference log-probs and values, as far as the task or the update asks for them."""
        task, update = self.task.needs, self.updater.needs
        old, ref = task.log_probs or update.log_probs, task.ref_log_probs or update.ref_log_probs
        log_probs, ref_log_probs, values = None, None, None
        with self.policy.on_device() if old or ref else nullcontext():
            if old:
                with clock("old_log_prob"):
                    log_probs = self.updater.log_probs(batch.rows)
            if ref:
                with clock("ref"):
                    ref_log_probs = self.updater.reference_log_probs(batch.rows)
        if self.critic is not None:
            with clock("values"), self.critic.on_device():
                values = self.critic.values(batch.rows)
        return Measured(log_probs, ref_log_probs, values)

    def _learn(self, step: int, batch: RolloutBatch, measured: Measured, clock: _Clock) -> UpdateReport:
        """Updates of critic, actor and sampler; the actor waits until step ``trainer.critic_warmup``."""
        reports = []
        if self.critic is not None:
            assert measured.values is not None
            with clock("update_critic"), self.critic.learning():
                reports.append(self.critic.update(batch, measured.values))
        if step >= self.settings.trainer.critic_warmup:
            with self.updater.learning():
                with clock("update_actor"):
                    reports.append(self.updater.update(batch, measured))
                with clock("update_weights"):
                    self.policy.sync()
        return joined(reports)

    def _prompts(self, step: int) -> list[int]:
        settings = self.settings.step
        return prompts_of_step(
            self.task.train_size, settings.train_batch_size, self.settings.seed, step, settings.shuffle
        )

    def _count(self, step: int, batch: RolloutBatch, report: UpdateReport) -> None:
        skipped = len(report.skipped)
        in_a_row = self.progress.skipped_in_a_row + report.stalled if report.stalled else 0
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
            try:
                result = self.task.validate(self.progress.step)
            except RewardFailed as error:
                self.tracker.write_trajectories(self.progress.step, error.records, "val")
                raise
            self.engine.sleep()
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
            actor=_trained(self.policy.state(), self.updater),
            reference=self.reference,
            identity=self.identity,
            critic=None if self.critic is None else _trained(self.critic.state(), self.critic),
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
        if (critic := self.settings.critic) is not None:
            per_step += critic.ppo_epochs * settings.train_batch_size // critic.ppo_mini_batch_size
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
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun

    def split(self, phase: str, part: str, seconds: float) -> None:
        """Gives ``part`` a share of the seconds of ``phase``; nothing where the share is 0."""
        if seconds:
            self.seconds[phase] -= seconds
            self.seconds[part] = seconds

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


def _trained(weights: Mapping[str, torch.Tensor], role: Updater | Critic) -> Trained:
    return Trained(weights, role.optimizer.state_dict(), role.schedule.state_dict())


def _train_metrics(batch: RolloutBatch, report: UpdateReport) -> tuple[dict[str, float], dict[str, int]]:
    metrics, counts = batch.metrics.prefixed("train/")
    metrics |= dict(batch.named) | dict(report.metrics)
    counts |= dict(batch.counts)
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
    }
    if "update_actor" in seconds:  # the actor waits while the critic warms up
        metrics["perf/update_tokens_per_s"] = tokens / seconds["update_actor"]
    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics
