"""The one place that a run reports its metrics to: the record, W&B as a copy, and whoever else listens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from poimen_exp.tracking.metrics_log import MetricLine, MetricsLog, lines_logged
from poimen_exp.tracking.provenance import Provenance
from poimen_exp.tracking.result import Status
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.settings import TrackingSettings
from poimen_exp.tracking.trajectories import RolloutRecord, write_trajectories
from poimen_exp.tracking.wandb_copy import WandbCopy
from poimen_exp.tracking.wandb_online import require_online
from poimen_exp.wording import counted

Listener = Callable[[MetricLine], None]
"""Told of every line after it was recorded: the progress line, a test."""


def say_on_stderr(sentence: str) -> None:
    """Prints a sentence about the run where it does not mix with its results."""
    print(sentence, file=sys.stderr, flush=True)


_MOVED_NAMED = 8
"""Files named one by one when a resumed run moves them away."""


class Tracker:
    """Sends each step to ``metrics.jsonl`` first, then to the listeners and to W&B.

    Use it with ``with``: leaving it through an exception finishes the W&B run as failed, through Ctrl-C as
    interrupted. A second ``finish`` does nothing.

    Args:
        folder: of the run; its lock should be held.
        config: the resolved configuration, plain values.
        listeners: told of every recorded line.
        say: where sentences go (a repaired log, files moved away, W&B lost).

    Raises:
        Refused: ``tracking.wandb=online`` and W&B cannot be reached with this machine's key.
    """

    def __init__(
        self,
        folder: RunFolder,
        settings: TrackingSettings,
        config: Mapping[str, Any],
        listeners: Sequence[Listener] = (),
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        if settings.wandb == "online":
            require_online()
        self.folder, self.settings = folder, settings
        self._listeners, self._finished, self._say = tuple(listeners), False, say
        self.record = MetricsLog(folder.metrics, say=say)
        self._wandb: WandbCopy | None = None
        if settings.wandb != "disabled":
            self._wandb = WandbCopy(folder, settings, config, lines_logged(folder.path), say)

    def log(self, step: int, metrics: Mapping[str, float], counts: Mapping[str, int]) -> None:
        """Records the metrics of a step, synced to disk before this returns.

        A validation may be logged on its own, at an equal or earlier step than what was logged before.

        Raises:
            RunFailed: an unknown name, a number that is not finite, a mean without its count.
        """
        line = self.record.append(step, metrics, counts)
        for listener in self._listeners:
            listener(line)
        if self._wandb is not None:
            self._wandb.log(line)

    def write_trajectories(
        self, step: int, records: Iterable[RolloutRecord], side: Literal["train", "val"] = "train"
    ) -> None:
        """Writes the rollouts of a step, unless ``tracking.trajectory_freq`` leaves this one out."""
        every = self.settings.trajectory_freq
        if every > 0 and step % every == 0:
            write_trajectories(self.folder.trajectory_file(step, side), records)

    @property
    def metrics_bytes(self) -> int:
        """Length of the record: what a checkpoint stores, and ``rewind`` takes."""
        return self.record.position

    def rewind(self, step: int, metrics_bytes: int) -> None:
        """Brings the records back to a checkpoint before the run goes on, and tells what moved; see ``RunFolder``."""
        moved = [path.name for path in self.folder.rewind(self.record, step, metrics_bytes)]
        if moved:
            late = f"steps behind step {step}" if step >= 0 else "all steps"
            more = f" and {len(moved) - _MOVED_NAMED} more" if len(moved) > _MOVED_NAMED else ""
            names = ", ".join(moved[:_MOVED_NAMED]) + more
            self._say(f"{counted(len(moved), 'file')} of {late} moved to {self.folder.recovery_tails}: {names}")

    def describe(self, provenance: Provenance) -> None:
        """Writes ``provenance.json`` and copies it to W&B; unmeasured labels become a tag there too."""
        self.folder.write_provenance(provenance)
        if self._wandb is not None:
            self._wandb.describe({"provenance": provenance.to_json()})
            if provenance.corpus is not None and provenance.corpus.label_status == "unmeasured":
                self._wandb.tag("unmeasured-labels")

    def finish(self, status: Status) -> None:
        """Closes record and copy; W&B shows a run as failed unless it converged or completed."""
        if self._finished:
            return
        self._finished = True
        self.record.close()
        if self._wandb is not None:
            self._wandb.finish(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish("completed")
        else:
            self.finish("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")
