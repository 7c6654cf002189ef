"""The copy of a run in W&B. It may fail at any point; the run goes on, and ``metrics.jsonl`` has everything."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from poimen_exp.tracking.files import write_atomic
from poimen_exp.tracking.metric_names import FAMILIES, STEP_AXIS
from poimen_exp.tracking.metrics_log import MetricLine
from poimen_exp.tracking.result import GOOD, OBJECTIVE, Status
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.settings import TrackingSettings

COUNT_PREFIX = "counts/"
"""A mean's denominator stands beside it as ``counts/<name>``."""


class WandbCopy:
    """One W&B run for one run folder; a resumed folder goes on in the same one.

    Args:
        rows: lines that the run has logged before, those a resume dropped included. W&B drops a row whose own
            counter runs backwards, so rows are numbered by arrival; ``step`` is an ordinary column and the x axis.
        say: where a sentence about a failure goes.
    """

    def __init__(
        self,
        folder: RunFolder,
        settings: TrackingSettings,
        config: Mapping[str, Any],
        rows: int,
        say: Callable[[str], None],
    ) -> None:
        self._say, self._row = say, rows
        self._run: Any = None
        self._attempt("start", lambda: self._start(folder, settings, config))

    def _start(self, folder: RunFolder, settings: TrackingSettings, config: Mapping[str, Any]) -> None:
        import wandb

        group = settings.group or f"{folder.path.parent.parent.name}/{folder.path.parent.name}"
        self._run = wandb.init(
            mode=settings.wandb,
            dir=str(folder.path),
            id=_run_id(folder),
            resume="allow",
            reinit="finish_previous",
            project=settings.project,
            entity=settings.entity,
            group=group,
            name=settings.name or f"{group}/{folder.path.name}",
            job_type=settings.job_type,
            tags=list(settings.tags),
            config=dict(config),
            settings=_wandb_settings(),
        )
        self._run.define_metric(STEP_AXIS)
        for family in FAMILIES:
            self._run.define_metric(f"{family}/*", step_metric=STEP_AXIS)
        self._run.define_metric(OBJECTIVE, step_metric=STEP_AXIS, summary="max,last")
        self._row = max(self._row, int(self._run.step))

    def log(self, line: MetricLine) -> None:
        """Copies one line of the record."""
        row = {STEP_AXIS: line.step, "time_s": line.time_s, **line.metrics}
        row |= {f"{COUNT_PREFIX}{name}": count for name, count in line.counts.items()}
        self._attempt("log", lambda: self._run.log(row, step=self._row))
        self._row += 1

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Adds facts to the run's config (corpus hash, label status, versions)."""
        self._attempt("describe", lambda: self._run.config.update(dict(facts), allow_val_change=True))

    def tag(self, tag: str) -> None:
        """Adds a tag."""

        def add() -> None:
            self._run.tags = (*self._run.tags, tag)

        self._attempt("tag", add)

    def finish(self, status: Status) -> None:
        """Closes the run: finished after a good end, failed otherwise."""

        def close() -> None:
            self._run.summary["status"] = status
            self._run.finish(exit_code=0 if status in GOOD else 1)

        self._attempt("finish", close)
        self._run = None

    def _attempt(self, what: str, call: Callable[[], object]) -> None:
        if self._run is None and what != "start":
            return
        try:
            call()
        except Exception as error:  # W&B must not end a run
            self._run = None
            self._say(f"W&B: {what} failed ({error!r}): no further copy; metrics.jsonl goes on as the record")


def _run_id(folder: RunFolder) -> str:
    if not folder.wandb_id.exists():
        write_atomic(folder.wandb_id, secrets.token_hex(4).encode())
    return folder.wandb_id.read_text().strip()


def _wandb_settings() -> Any:
    import wandb

    return wandb.Settings(
        console="off",  # it would wrap stdout and stderr for the whole process, and again for each job of a sweep
        silent=True,
        init_timeout=30,
        finish_timeout=60,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_save_requirements=False,
    )
