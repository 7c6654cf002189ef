"""What a user sees while a run trains, and the table at its end. Every number has a name, a unit and a denominator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from poimen_exp.tracking.metric_names import denominator_in
from poimen_exp.tracking.metrics_log import MetricLine, by_step
from poimen_exp.tracking.result import OBJECTIVE
from poimen_exp.wording import wide_console

_Part = Text | str | tuple[str, str]

_ETA_STEPS = 20
"""Steps whose mean duration the estimate is made from."""

LINE_METRICS: tuple[tuple[str, str], ...] = (
    ("gates/update_accuracy/evidence_present", "update ok on evidence"),
    ("gates/update_accuracy/evidence_free", "update ok without evidence"),
    ("gates/exit/exact", "exit exact"),
    ("reward/total", "reward"),
)
_PROMPTS_REWARD = "critic/score/mean"
"""What a batch of prompts logs, under verl's name, in the place of ``train/reward/total``."""
TABLE_METRICS: tuple[tuple[str, str], ...] = (
    ("reward/total", "reward, mean"),
    ("reward/outcome", "answer right, share"),
    ("gates/update_accuracy/evidence_present", "update ok on evidence, share"),
    ("gates/update_accuracy/evidence_free", "update ok without evidence, share"),
    ("gates/update_rate", "updated, share"),
    ("gates/exit/exact", "exit exact, share"),
    ("gates/exit/early", "exit early, share"),
    ("gates/exit/late", "exit late, share"),
    ("gates/format_correct", "turns parsed, share"),
    ("gates/chunks_read", "chunks read, mean"),
    ("gates/memory_tokens", "memory tokens, mean"),
)


class ProgressLine:
    """Prints a line for each step of training and each validation: a ``Tracker`` listener.

    On a terminal the names are dimmed; elsewhere it is plain text, one line however long.

    Args:
        total_steps: of the run, for the estimate.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._total = total_steps
        self._console = Console() if console is None else console
        self._durations_s: deque[float] = deque(maxlen=_ETA_STEPS)
        self._last_time_s: float | None = None

    def __call__(self, line: MetricLine) -> None:
        """Prints what ``line`` holds of training, then what it holds of validation."""
        if parts := _parts(line, "train"):
            self._print(self._training(line, parts))
        if any(name.startswith("val/") for name in line.metrics):
            self._print(Text.assemble((f"validation at step {line.step}", "bold"), *_parts(line, "val")))
        self._last_time_s = line.time_s

    def _training(self, line: MetricLine, parts: list[_Part]) -> Text:
        text = Text.assemble((f"step {line.step}/{self._total}", "bold"), *parts)
        duration_s = line.metrics.get("timing_s/step")
        if duration_s is None and self._last_time_s is not None:
            duration_s = line.time_s - self._last_time_s
        if duration_s is not None:
            self._durations_s.append(duration_s)
            left = max(0, self._total - line.step)
            text.append(f"  {duration_s:.1f} s/step", style="dim")
            text.append(f"  ETA {format_duration(fmean(self._durations_s) * left)}", style="dim")
        return text

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


def _parts(line: MetricLine, side: str) -> list[_Part]:
    parts: list[_Part] = []
    for metric, label in LINE_METRICS:
        name = f"{side}/{metric}"
        unit = denominator_in(name, line.metrics)
        if name == "train/reward/total" and name not in line.metrics:
            name = _PROMPTS_REWARD
        if name in line.metrics:
            label = f"{side} {label}" if metric.startswith("reward/") else label
            parts += [(f"  {label} ", "dim"), _value(line, name, unit)]
    failed = line.metrics.get(f"{side}/rollout/failed", 0.0)
    if failed:
        parts.append((f"  failed rollouts {failed:g}", "red"))
    return parts


def _value(line: MetricLine, name: str, unit: str | None = None) -> str:
    count = line.counts.get(name)
    if count is None:
        return f"{line.metrics[name]:.2f}"
    return f"{line.metrics[name]:.2f} ({count:,}{f' {unit}' if unit else ''})"


def format_duration(seconds: float) -> str:
    """A duration to read: ``42 s``, ``9 min 42 s``, ``3 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def best_validation(lines: Iterable[MetricLine]) -> int | None:
    """The step of the highest ``val/reward/total``, the first of equals; None without a validation."""
    rewards = {step: line.metrics[OBJECTIVE] for step, line in by_step(lines).items() if OBJECTIVE in line.metrics}
    return max(rewards, key=lambda step: (rewards[step], -step), default=None)


def results_table(lines: Iterable[MetricLine], best_step: int | None = None, start: str = "base") -> Table | None:
    """The first validation beside the best and the last one, each number with its n.

    Args:
        lines: of ``metrics.jsonl``.
        best_step: step of the best validation; found from the lines if left out.
        start: what the validation at step 0 measured; a first validation at a later step is headed ``first``.

    Returns:
        None without a validation.
    """
    lines = tuple(lines)
    validations = {step: line for step, line in by_step(lines).items() if OBJECTIVE in line.metrics}
    if not validations:
        return None
    best_step = best_validation(lines) if best_step is None else best_step
    first, last = min(validations), max(validations)
    heads: dict[int, list[str]] = {first: [start if first == 0 else "first"]}
    if best_step in validations:
        heads.setdefault(best_step, []).append("best")
    heads.setdefault(last, []).append("last")
    logged = [name for line in validations.values() for name in line.metrics]
    table = Table(title="validation: value (n)", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("n counts")
    for step, names in heads.items():
        table.add_column(f"{', '.join(names)}\nstep {step}", justify="right", no_wrap=True)
    for metric, label in TABLE_METRICS:
        name = f"val/{metric}"
        if any(name in validations[step].metrics for step in heads):
            cells = (_value(line, name) if name in line.metrics else "-" for line in
                     (validations[step] for step in heads))  # fmt: skip
            table.add_row(label, denominator_in(name, logged) or "", *cells)
    return table


def print_results(
    lines: Iterable[MetricLine], best_step: int | None = None, start: str = "base", console: Console | None = None
) -> None:
    """Prints ``results_table``, or says that nothing was validated."""
    console = wide_console() if console is None else console
    table = results_table(lines, best_step, start)
    console.print("no validation was logged: no result table" if table is None else table)
