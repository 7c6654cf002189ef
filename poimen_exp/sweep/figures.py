"""The curves of a sweep: one PNG, and one figure for the page. Thin lines are seeds, thick ones their mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poimen_exp.sweep.panels import COLORS, PANELS
from poimen_exp.sweep.records import SweepRuns, label

Series = dict[int, float]


@dataclass(frozen=True)
class Curves:
    """What one setting draws in one panel."""

    name: str
    color: str
    seeds: tuple[tuple[int, Series], ...]
    mean: Series
    """Over the seeds, at the steps that all of them have."""


def curves_of(sweep: SweepRuns, metric: str) -> tuple[Curves, ...]:
    """The curves of a panel, a colour a setting; settings without the metric are left out."""
    return tuple(curves for curves in _all_curves(sweep, metric) if curves.seeds)


def _all_curves(sweep: SweepRuns, metric: str) -> Iterator[Curves]:
    for position, setting in enumerate(sweep.settings):
        runs = [run for run in sweep.runs if run.setting == setting]
        seeds = tuple((run.seed, series) for run in runs if (series := run.series(metric)))
        yield Curves(label(setting), COLORS[position % len(COLORS)], seeds, mean_of([s for _, s in seeds]))


def mean_of(series: Sequence[Series]) -> Series:
    """Mean over series at the steps that all have; empty where there is none."""
    shared = set.intersection(*(set(one) for one in series)) if series else set()
    return {step: sum(one[step] for one in series) / len(series) for step in sorted(shared)}


def write_png(sweep: SweepRuns, path: Path, title: str) -> None:
    """Draws the four panels into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for curves in curves_of(sweep, panel.metric):
            _draw(axes, curves)
        axes.set(title=panel.title, xlabel="step", ylabel=panel.metric)
        axes.yaxis.label.set_fontsize(8)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def _draw(axes: Any, curves: Curves) -> None:
    for _, series in curves.seeds:
        axes.plot(list(series), list(series.values()), color=curves.color, alpha=0.35, linewidth=0.8)
    name = f"{curves.name} ({len(curves.seeds)} seeds)" if len(curves.seeds) != 1 else f"{curves.name} (1 seed)"
    # A marker, so that a curve of one step is seen.
    axes.plot(list(curves.mean), list(curves.mean.values()), color=curves.color, linewidth=2, marker=".", label=name)


def interactive(sweep: SweepRuns) -> str:
    """The four panels as an HTML fragment that needs nothing from the network."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=2, subplot_titles=[panel.title for panel in PANELS])
    for position, panel in enumerate(PANELS):
        row, column = position // 2 + 1, position % 2 + 1
        for curves in curves_of(sweep, panel.metric):
            for trace in _traces(curves, first_panel=position == 0):
                figure.add_trace(trace, row=row, col=column)
        figure.update_xaxes(title_text="step", row=row, col=column)
    figure.update_layout(height=800, template="plotly_white", legend_title_text="setting")
    return str(figure.to_html(full_html=False, include_plotlyjs=True, div_id="curves"))


def _traces(curves: Curves, *, first_panel: bool) -> Iterator[Any]:
    from plotly.graph_objects import Scatter

    common = {"legendgroup": curves.name, "line": {"color": curves.color, "width": 1}, "mode": "lines"}
    for seed, series in curves.seeds:
        hover = f"{curves.name}, seed {seed}"
        yield Scatter(x=list(series), y=list(series.values()), name=hover, opacity=0.35, showlegend=False, **common)
    yield Scatter(
        x=list(curves.mean),
        y=list(curves.mean.values()),
        name=curves.name,
        showlegend=first_panel,
        **common | {"line": {"color": curves.color, "width": 3}, "mode": "lines+markers"},
    )
