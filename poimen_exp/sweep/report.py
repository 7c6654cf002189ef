"""``poimen report``: what a sweep has shown so far, as a table, a picture, a page and a JSON file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from poimen_exp.sweep.compare import (
    TABLE_METRICS,
    At,
    Comparison,
    Row,
    collapses,
    common_step,
    compare,
    pairs,
    table,
    verdict,
)
from poimen_exp.sweep.figures import interactive, write_png
from poimen_exp.sweep.records import RunRecord, Setting, SweepRuns, label, load_sweep
from poimen_exp.sweep.stats import Estimate
from poimen_exp.sweep.task import ERROR_FILE
from poimen_exp.tracking.files import write_atomic, write_json
from poimen_exp.tracking.metric_names import denominator_in
from poimen_exp.wording import counted


@dataclass(frozen=True)
class Report:
    """The findings of a sweep, ready to be written."""

    sweep: SweepRuns
    notes: tuple[str, ...]
    """What a reader must know about the numbers: where they come from, and what is missing."""
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    verdict: str

    @property
    def is_finished(self) -> bool:
        """Whether every run of the sweep has ended."""
        return not unfinished(self.sweep)


def make_report(folder: Path, at: At, asked: tuple[str, str] | None, *, partial: bool) -> Report:
    """The report on a sweep's folder.

    Args:
        at: which validation a run is judged by.
        asked: the two alphas to compare; None for each against alpha 0.9 (or the first).
        partial: runs that go on count too, all of them up to the last step that all have validated.
    """
    sweep = load_sweep(folder)
    runs = sweep.runs if partial else sweep.ended
    until = common_step(runs) if partial and unfinished(sweep) else None
    return Report(
        sweep=sweep,
        notes=_notes(sweep, at, until),
        rows=table(runs, sweep.settings, at, until),
        comparisons=tuple(compare(runs, one, two, at, until) for one, two in pairs(sweep, asked)),
        verdict=verdict(collapses(runs), runs),
    )


def write_report(report: Report, out: Path) -> tuple[Path, ...]:
    """Writes ``report.md``, ``report.json``, ``curves.png`` and ``report.html``; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = tuple(out / name for name in ("report.md", "report.json", "curves.png", "report.html"))
    title = f"{report.sweep.folder.absolute().parent.name}/{report.sweep.folder.absolute().name}"
    if not report.is_finished:
        title += " - UNFINISHED"
    write_atomic(paths[0], as_markdown(report).encode())
    write_json(paths[1], _as_json(report))
    write_png(report.sweep, paths[2], title)
    write_atomic(paths[3], _page(report, title).encode())
    return paths


def unfinished(sweep: SweepRuns) -> tuple[str, ...]:
    """A line for each run that has not ended and each slot without a run."""
    lines = [_state(run) for run in sweep.runs if not run.ended]
    begun = len(sweep.runs)
    if sweep.expected > begun:
        lines.append(f"{sweep.expected - begun} of {sweep.expected} trials have not begun")
    return tuple(lines)


def as_markdown(report: Report) -> str:
    """The tables and the verdict, as they go into docs."""
    parts = [f"# {report.sweep.folder.name}", "", *(f"- {note}" for note in report.notes), "", "## Settings", ""]
    parts += _markdown_table(headings(report.rows), table_cells(report.rows))
    for comparison in report.comparisons:
        parts += ["", f"## {label(comparison.second)} minus {label(comparison.first)}, paired by seed", ""]
        parts += _markdown_table(("metric", "difference, 95 % bootstrap", "seeds"), difference_cells(comparison))
    return "\n".join([*parts, "", report.verdict, ""])


def table_cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each metric that some run has: its name, what n counts, and a cell for each setting."""
    logged = {name for row in rows for name in row.estimates} or {name for name, _ in TABLE_METRICS}
    return [
        [title, denominator_in(name, logged) or "", *(_cell(row.estimates.get(name)) + _n(row, name) for row in rows)]
        for name, title in TABLE_METRICS
        if name in logged
    ]


def _n(row: Row, name: str) -> str:
    return f" (n {row.counts[name]:,})" if name in row.counts else ""


def difference_cells(comparison: Comparison) -> list[list[str]]:
    """A line for each metric: the difference with its interval, and the number of seeds."""
    found = comparison.differences
    cells = [
        [title, _cell(found[name], sign="+"), str(found[name].n)] for name, title in TABLE_METRICS if name in found
    ]
    return cells or [["-", "no seed was run with both", "0"]]


def headings(rows: Sequence[Row]) -> list[str]:
    """Of ``table_cells``: with the setting of each row and its number of seeds."""
    return ["metric", "n counts", *(f"{label(row.setting)} ({counted(len(row.seeds), 'seed')})" for row in rows)]


def _cell(estimate: Estimate | None, sign: str = "") -> str:
    if estimate is None:
        return "-"
    mean = f"{estimate.mean:{sign}.3f}"
    if estimate.low is None or estimate.high is None:
        return f"{mean} [one seed]"
    return f"{mean} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


def _notes(sweep: SweepRuns, at: At, until: int | None) -> tuple[str, ...]:
    judged = "last validation" if at == "last" else "validation with the best val/reward/total"
    means = f"Means and 95 % t-intervals over seeds, each run at its {judged}"
    notes = [f"{means}. n: over all seeds. Source: metrics.jsonl."]
    missing = unfinished(sweep)
    if missing:
        counted = f"{len(sweep.ended)} of {sweep.expected or len(sweep.runs)} trials have ended"
        scope = "only those are in the tables" if until is None else f"all runs are in the tables, up to step {until}"
        notes.append(f"UNFINISHED SWEEP: {counted}; {scope}. {'; '.join(missing)}.")
    return tuple(notes)


def _state(run: RunRecord) -> str:
    error = run.folder / ERROR_FILE
    if error.is_file():
        return f"{label(run.setting)}, seed {run.seed} failed after step {run.last_step}, see {error}"
    return f"{_name(run)} is at step {run.last_step}"


def _name(run: RunRecord) -> str:
    state = f" ({run.result.status})" if run.result is not None else ""
    return f"{label(run.setting)}, seed {run.seed}{state}"


def _markdown_table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *(_line(row) for row in cells)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _as_json(report: Report) -> dict[str, object]:
    return {
        "sweep": str(report.sweep.folder),
        "finished": report.is_finished,
        "notes": list(report.notes),
        "settings": [
            {
                "setting": dict(row.setting),
                "seeds": list(row.seeds),
                "metrics": _estimates(row.estimates),
                "counts": row.counts,
            }
            for row in report.rows
        ],
        "differences": [
            {"first": dict(c.first), "second": dict(c.second), "metrics": _estimates(c.differences)}
            for c in report.comparisons
        ],
        "verdict": report.verdict,
    }


def _estimates(estimates: dict[str, Estimate]) -> dict[str, object]:
    return {name: asdict(estimate) for name, estimate in estimates.items()}


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.3rem .6rem;text-align:left}"
    ".verdict{border-left:4px solid #D55E00;padding-left:.8rem;font-weight:600}"
)


def _page(report: Report, title: str) -> str:
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    parts = [
        f"<h1>{html.escape(title)}</h1><ul>{notes}</ul><p class='verdict'>{html.escape(report.verdict)}</p>",
        _html_table(headings(report.rows), table_cells(report.rows)),
    ]
    for comparison in report.comparisons:
        parts.append(f"<h2>{html.escape(_minus(comparison.first, comparison.second))}</h2>")
        parts.append(_html_table(["metric", "difference, 95 % bootstrap", "seeds"], difference_cells(comparison)))
    parts.append(interactive(report.sweep))
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _minus(first: Setting, second: Setting) -> str:
    return f"{label(second)} minus {label(first)}, paired by seed"


def _html_table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
