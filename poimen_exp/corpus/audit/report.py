"""A check as JSON, and as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import io
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from poimen_exp.corpus.audit.check import CheckReport
from poimen_exp.corpus.audit.facts import Facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PROJECTS = 40


def as_json(report: CheckReport) -> dict[str, Any]:
    """The report without its columns."""
    return {
        "path": report.path,
        "corpus_id": report.corpus_id,
        "label_status": report.label_status,
        "n_problems": report.n_problems,
        "problems": list(report.problems),
        "dropped": dict(report.dropped),
        "audits": [asdict(audit) for audit in report.audits],
        "split": None if report.split is None else dict(sorted(report.split.side_of.items())),
    }


def write_html(report: CheckReport, path: Path) -> None:
    """Writes the page: problems, audits, and plots as inline SVG."""
    problems = "".join(f"<li><code>{html.escape(problem)}</code></li>" for problem in report.problems)
    more = report.n_problems - len(report.problems)
    rows = "".join(
        f"<tr class={'warn' if audit.warn else 'ok'}><td>{html.escape(audit.name)}</td><td>{html.escape(audit.shown)}"
        f"</td><td>{audit.verdict}</td><td>{html.escape(audit.meaning)}</td></tr>"
        for audit in report.audits
    )
    plots = "" if report.facts is None else _plots(report.facts)
    title = html.escape(f"{report.corpus_id or report.path}: corpus check")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p><code>{html.escape(report.path)}</code>, "
        f"labels {html.escape(report.label_status or '?')}</p>"
        f"<h2>Problems: {report.n_problems}</h2><ul>{problems}</ul>{f'<p>and {more} more</p>' if more else ''}"
        f"<h2>Audits</h2><table><tr><th>audit<th>value<th><th>what it is</tr>{rows}</table>{plots}</html>\n"
    )
    path.write_text(page, encoding="utf-8")


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.3rem .7rem;border-bottom:1px solid #ddd;text-align:left}"
    ".warn td{background:#fff3d6}svg{max-width:100%;height:auto}"
)


def _plots(facts: Facts) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _positions(axes[0, 0], facts)
    _exits(axes[0, 1], facts)
    _lengths(axes[1, 0], facts)
    _balance(axes[1, 1], facts)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return f"<h2>Plots</h2>{svg[svg.index('<svg') :]}"


def _positions(axis: Axes, facts: Facts) -> None:
    axis.hist(facts.at(facts.evidence == 1)[1], bins=20, range=(0, 1), color="#2a6f97")
    axis.set(title="Position of evidence", xlabel="middle of the chunk / trajectory", ylabel="chunks with evidence")


def _exits(axis: Axes, facts: Facts) -> None:
    known = facts.exit_index[facts.exit_index >= 0]
    never, unknown = int((facts.exit_index == -1).sum()), int((facts.exit_index == -2).sum())
    if len(known):
        axis.hist(known, bins=min(50, int(known.max()) + 1), color="#2a6f97")
    axis.set(title=f"Exit index (never: {never}, unknown: {unknown})", xlabel="chunk index", ylabel="trajectories")


def _lengths(axis: Axes, facts: Facts) -> None:
    axis.hist(facts.n_chunks, bins=min(50, int(facts.n_chunks.max() - facts.n_chunks.min()) + 1), color="#2a6f97")
    axis.set(title="Chunks per trajectory", xlabel="chunks", ylabel="trajectories")


def _balance(axis: Axes, facts: Facts) -> None:
    total, positive = (
        np.bincount(facts.project, facts.per_task(mask), len(facts.projects)).astype(np.int64)
        for mask in (facts.evidence >= 0, facts.evidence == 1)
    )
    shown = [project for project in np.argsort(-total, kind="stable") if total[project]][:MAX_PROJECTS]
    axis.barh([facts.projects[one][:24] for one in shown][::-1], [positive[one] / total[one] for one in shown][::-1])
    axis.tick_params(axis="y", labelsize=7)
    left_out = int((total > 0).sum()) - len(shown)
    axis.set(title="Chunks with evidence by project" + (f" ({left_out} more)" if left_out else ""), xlabel="share")
