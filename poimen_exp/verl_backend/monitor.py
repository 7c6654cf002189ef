"""What a verl run reports at each step, and when it ends: the driver's side, without verl."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from poimen_exp.errors import RunFailed
from poimen_exp.gates.metrics import Means, advantage_metrics, gate_metrics
from poimen_exp.gates.scoring import Advantages, GateRows, ScoredTrajectory
from poimen_exp.solo.checkpoint import Progress
from poimen_exp.solo.gate_task import collapse_watch
from poimen_exp.solo.loop import collapse_alarm
from poimen_exp.tracking.result import OBJECTIVE
from poimen_exp.verl_backend.settings import VerlSettings

_PER_ROW = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_", "ppl_ratio", "chi2_seq")
LEFT_OUT = (
    "training/num_turns/",
    "timing_per_token_ms/",
    *(f"rollout_corr/{name}" for name in _PER_ROW),
)
"""verl's means over rows, padding rows among them: a long reading would count once a turn, and padding as a zero."""
VERL_NAMES = (
    "actor/",
    "global_seqlen/",
    "perf/",
    "prompt_length/",
    "rollout_corr/",
    "timing_s/",
    "training/",
)
"""verl's metrics that are kept, but for ``LEFT_OUT``. Its rewards, returns and response lengths are means over rows;
ours stand under ``train/`` and ``val/``."""

_SKIPS_IN_A_ROW = 3
_SKIPPED_SHARE = 0.1


@dataclass
class StepReport:
    """Metrics of the step in progress and what each mean was taken over."""

    metrics: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def take(self, means: Means, prefix: str) -> None:
        """Adds means; those of ``advantage/`` exist on one side only and have no prefix."""
        for name, value in means.means().items():
            full = name if name.startswith("advantage/") else prefix + name
            self.metrics[full], self.counts[full] = value, means.counts[name]

    def count(self, name: str, value: float, of: int) -> None:
        """Adds a number out of ``of``."""
        self.metrics[name], self.counts[name] = float(value), of


class Monitor:
    """Progress of a run and the rules that end it.

    Args:
        steps: optimizer steps planned for the whole run.
        say: where sentences about the run go.
    """

    def __init__(self, settings: VerlSettings, progress: Progress, steps: int, say: Callable[[str], None]) -> None:
        self._settings, self._planned, self._say = settings, steps, say
        self.progress = progress
        self.report = StepReport()
        self._watch: Means | None = None
        self._sampled = self._tokens = 0

    def rolled_out(
        self, scored: Sequence[ScoredTrajectory], rows: GateRows, advantages: Advantages, attempted: int
    ) -> None:
        """Takes a training batch.

        Raises:
            RunFailed: more rollouts failed than ``rollout.max_failed`` allows.
        """
        failed = attempted - len(scored)
        limit = self._settings.max_failed
        if failed > limit * attempted or failed == attempted:
            raise RunFailed(
                f"step {self.progress.step + 1}: {failed} of {attempted} rollouts failed, above rollout.max_failed="
                f"{limit}; the agent-loop workers' log has the first error (Error in _run_prompt)"
            )
        self._watch = collapse_watch(scored)
        turns = [turn for item in scored for turn in item.trajectory.turns]
        self._sampled = sum(len(turn.generation.ids) for turn in turns)
        self._tokens = self._sampled + sum(len(turn.prompt.ids) for turn in turns)
        self.report.take(gate_metrics(scored), "train/")
        self.report.take(advantage_metrics(scored, rows, advantages), "train/")
        self.report.count("train/rollout/failed", failed, attempted)
        groups = self._settings.train_batch_size
        self.progress = replace(
            self.progress, groups=self.progress.groups + groups, samples=self.progress.samples + attempted
        )

    def validated(self, scored: Sequence[ScoredTrajectory], attempted: int) -> None:
        """Takes a validation.

        Raises:
            RunFailed: no rollout of it finished.
        """
        if not scored:
            raise RunFailed(
                f"validation at step {self.progress.step}: every rollout failed, so {OBJECTIVE} does not exist; the "
                "agent-loop workers' log has the first error (Error in _run_prompt)"
            )
        self.report.take(gate_metrics(scored), "val/")
        self.report.count("val/rollout/failed", attempted - len(scored), attempted)

    def updated(self, grad_norms: Sequence[float]) -> None:
        """Takes the gradient norms of a step's optimizer steps; verl leaves out those that are not finite."""
        skipped, longest, in_a_row = 0, 0, self.progress.skipped_in_a_row
        for norm in grad_norms:
            fine = math.isfinite(norm)
            skipped += not fine
            in_a_row = 0 if fine else in_a_row + 1
            longest = max(longest, in_a_row)
        finite = [norm for norm in grad_norms if math.isfinite(norm)]
        if finite:
            self.report.count("actor/grad_norm", sum(finite) / len(finite), len(finite))
        self.report.count("update/skipped", skipped, len(grad_norms))
        self.progress = replace(
            self.progress,
            optimizer_steps=self.progress.optimizer_steps + len(finite),
            skipped=self.progress.skipped + skipped,
            skipped_in_a_row=longest if longest >= _SKIPS_IN_A_ROW else in_a_row,
        )

    def close_step(self, step: int, verls: Mapping[str, Any]) -> StepReport:
        """Everything to log for ``step``; the next step begins.

        Args:
            verls: what verl logs; a number of its that is not finite is left out (its optimizer step was skipped, and
                is counted).
        """
        report, self.report = self.report, StepReport()
        for name, value in verls.items():
            kept = name.startswith(VERL_NAMES) and not name.startswith(LEFT_OUT) and name not in report.metrics
            if kept and math.isfinite(float(value)):
                report.metrics[name] = float(value)
        self._add_speed(report)
        self.progress = replace(self.progress, step=step)
        value = report.metrics.get(OBJECTIVE)
        if value is not None:
            self.progress = self.progress.validated(value, self._settings.stop.min_delta)
        return report

    def _add_speed(self, report: StepReport) -> None:
        """Tokens of the step and a second, as solo counts them: verl's numbers have padding rows in them."""
        metrics, padded = report.metrics, report.metrics.get("perf/total_num_tokens")
        if padded and self._tokens:
            metrics["perf/total_num_tokens"] = float(self._tokens)
            if "perf/throughput" in metrics:
                metrics["perf/throughput"] *= self._tokens / padded
        for phase, name, tokens in (("gen", "rollout", self._sampled), ("update_actor", "update", self._tokens)):
            seconds = metrics.get(f"timing_s/{phase}", 0.0)
            if seconds and tokens:
                metrics[f"perf/{name}_tokens_per_s"] = tokens / seconds
        self._sampled = self._tokens = 0

    def check(self) -> None:
        """Applies the rules to the step that was closed last.

        Raises:
            RunFailed: optimizer steps skipped, or a collapse that is to stop the run.
        """
        progress = self.progress
        allowed = max(_SKIPS_IN_A_ROW - 1, math.floor(_SKIPPED_SHARE * self._planned))
        if progress.skipped_in_a_row >= _SKIPS_IN_A_ROW or progress.skipped > allowed:
            raise RunFailed(
                f"step {progress.step}: {progress.skipped_in_a_row} optimizer steps in a row and {progress.skipped} of "
                f"{self._planned} in all were skipped: their gradients were not finite"
            )
        alarm = None if self._watch is None else collapse_alarm(self._watch)
        if alarm is not None:
            self._say(f"step {progress.step}: collapse alarm: {alarm}")
            if self._settings.stop.on_collapse == "stop":
                raise RunFailed(f"step {progress.step}: stopped by stop.on_collapse: {alarm}")

    @property
    def converged(self) -> bool:
        """Whether patience ran out."""
        patience = self._settings.stop.patience
        return patience is not None and self.progress.bad_validations >= patience
