"""The curves of one run from its ``metrics.jsonl``: a picture and a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poimen_exp.errors import Refused
from poimen_exp.sweep.panels import COLORS
from poimen_exp.tracking.files import write_atomic
from poimen_exp.tracking.metrics_log import MetricLine, by_step, read_metrics

Series = dict[int, float]


@dataclass(frozen=True)
class Panel:
    """One set of axes: what it shows, and its metrics with the name each has in the legend."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]


def _both(title: str, unit: str, *named: tuple[str, str]) -> Panel:
    """A panel with the training and the validation curve of every metric."""
    sides = (("train/", "train"), ("val/", "val"))
    return Panel(title, unit, tuple((side + name, f"{word}, {label}") for name, label in named for side, word in sides))


PANELS: tuple[Panel, ...] = (
    _both(
        "Update accuracy",
        "share of labelled chunks",
        ("gates/update_accuracy/evidence_present", "evidence"),
        ("gates/update_accuracy/evidence_free", "no evidence"),
    ),
    _both(
        "Exits",
        "share of readings",
        ("gates/exit/exact", "exact"),
        ("gates/exit/early", "early"),
        ("gates/exit/late", "late"),
    ),
    _both("Reward", "mean over readings", ("reward/total", "total"), ("reward/outcome", "outcome")),
    _both("Format", "share of turns", ("gates/format_correct", "parsed"), ("response_length/clipped", "clipped")),
    Panel(
        "Speed",
        "tokens a second",
        (
            ("perf/throughput", "whole step"),
            ("perf/rollout_tokens_per_s", "sampled, rollout"),
            ("perf/update_tokens_per_s", "update"),
        ),
    ),
    Panel(
        "Time of a step",
        "seconds",
        (
            ("timing_s/gen", "rollout"),
            ("timing_s/update_actor", "update"),
            ("timing_s/update_weights", "weights to sampler"),
            ("timing_s/testing", "validation"),
        ),
    ),
)


def write_curves(run: Path, out_png: Path, out_md: Path) -> None:
    """Draws a run's curves, and writes their numbers at the validated steps as Markdown.

    Raises:
        Refused: no run there, or no step in its log.
    """
    lines = list(by_step(read_metrics(run / "metrics.jsonl").lines).values())
    if not lines:
        raise Refused(f"{run}: no metrics.jsonl with a finished step; expected the folder of a run")
    out_png.parent.mkdir(parents=True, exist_ok=True)
    _draw(lines, out_png)
    write_atomic(out_md, as_markdown(lines).encode())


def series(lines: Sequence[MetricLine], metric: str) -> Series:
    """A metric at the steps that have it."""
    return {line.step: line.metrics[metric] for line in lines if metric in line.metrics}


def as_markdown(lines: Sequence[MetricLine]) -> str:
    """A table: a row for each metric, a column for the first, the last and every validated step; then the means."""
    steps = _shown_steps(lines)
    head = ["metric", *(f"step {step}" for step in steps), "mean of all steps"]
    rows = [head, ["---"] * len(head)]
    for panel in PANELS:
        for metric, _ in panel.metrics:
            values = series(lines, metric)
            if values:
                cells = [_cell(values[step]) if step in values else "" for step in steps]
                rows.append([f"`{metric}`", *cells, _cell(sum(values.values()) / len(values))])
    last = lines[-1]
    text = f"{last.step} steps in {last.time_s:.0f} s, validations and checkpoints included.\n\n"
    return text + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _shown_steps(lines: Sequence[MetricLine]) -> list[int]:
    trained = [line.step for line in lines if line.step > 0]
    validated = [line.step for line in lines if any(name.startswith("val/") for name in line.metrics)]
    return sorted({*trained[:1], *trained[-1:], *validated})


def _cell(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def _draw(lines: Sequence[MetricLine], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        _draw_panel(axes, panel, lines)
    figure.savefig(path, dpi=110)


def _draw_panel(axes: Any, panel: Panel, lines: Sequence[MetricLine]) -> None:
    """One colour a metric; validation is dashed, with a marker at each."""
    colors: dict[str, str] = {}
    for metric, label in panel.metrics:
        values = series(lines, metric)
        color = colors.setdefault(metric.removeprefix("train/").removeprefix("val/"), COLORS[len(colors) % len(COLORS)])
        if values:
            style = {"linestyle": "--", "marker": "o"} if metric.startswith("val/") else {"marker": "."}
            axes.plot(list(values), list(values.values()), color=color, label=label, linewidth=1.5, **style)
    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7)
