"""An evaluation on the terminal and on disk: each number with its interval and its denominator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from poimen_exp.evaluation.evaluate import SHOWN, Evaluation
from poimen_exp.evaluation.intervals import Estimate
from poimen_exp.tracking.files import write_json
from poimen_exp.tracking.progress import TABLE_METRICS
from poimen_exp.wording import counted, wide_console

_LABELS = dict(TABLE_METRICS)


def print_evaluation(result: Evaluation, *, as_json: bool) -> None:
    """The readers one below the other, then base and adapter by project."""
    if as_json:
        print(json.dumps(result.to_json()))
        return
    console = wide_console()

    def show(head: str, tables: Iterator[Table]) -> None:
        console.print(head, style="italic", markup=False, highlight=False, soft_wrap=True)
        for table in tables:
            console.print(table)
            console.print()

    of = f"{counted(result.tasks, 'task')} of {counted(result.projects, 'project')}"
    head = f"{result.split}: {of}, {counted(result.samples, 'reading')} each; answers matched by {result.matcher}"
    show(head, _tables({reader.reader: reader.overall for reader in result.readers}, str, columns=2))
    for reader in result.readers[: 1 + any(reader.reader == "adapter" for reader in result.readers)]:
        show(f"{reader.reader}, by project", _tables(reader.by_project, _mean, columns=4))
    failed = {reader.reader: reader.failed for reader in result.readers if reader.failed}
    if failed:
        console.print(f"readings that failed, in no mean: {failed}")
    console.print(
        "mean [95 % bootstrap interval over projects, over tasks below 5 projects] (n)", markup=False, soft_wrap=True
    )


def save_evaluation(result: Evaluation, run: Path) -> Path:
    """Writes ``evaluation/<split>.json`` into a run folder."""
    path = run / "evaluation" / f"{result.split}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, result.to_json())
    return path


def _tables(
    rows: Mapping[str, Mapping[str, Estimate]], cell: Callable[[Estimate], str], columns: int
) -> Iterator[Table]:
    """A row for each reader or project and a column for each metric that one of them has, ``columns`` a table."""
    counts = {metric: scores[metric].counts for scores in rows.values() for metric in SHOWN if metric in scores}
    shown = [metric for metric in SHOWN if metric in counts]
    for place in range(0, len(shown), columns):
        metrics = shown[place : place + columns]
        table = Table(box=None, pad_edge=False)
        table.add_column("", no_wrap=True)
        for metric in metrics:
            table.add_column(_LABELS[metric], justify="right")
        table.add_row("n counts", *(counts[metric] for metric in metrics), style="dim")
        for name, scores in rows.items():
            table.add_row(escape(name), *(cell(scores[metric]) if metric in scores else "-" for metric in metrics))
        yield table


def _mean(found: Estimate) -> str:
    return f"{found.mean:.3f} ({found.count:,})"
