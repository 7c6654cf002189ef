"""An evaluation on the terminal and on disk: each number with its interval and its denominator."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from poimen_exp.evaluation.evaluate import SHOWN, Evaluation, ReaderScores
from poimen_exp.tracking.files import write_json
from poimen_exp.wording import wide_console


def print_evaluation(result: Evaluation, *, as_json: bool) -> None:
    """The readers side by side, then base and adapter by project."""
    if as_json:
        print(json.dumps(result.to_json()))
        return
    console = wide_console()
    head = f"{result.split}: {result.tasks} tasks of {result.projects} projects, {result.samples} reading(s) each"
    console.print(_overall(result, f"{head}; answers matched by {result.matcher}"))
    for reader in result.readers[: 1 + any(reader.reader == "adapter" for reader in result.readers)]:
        console.print(_by_project(reader))
    failed = {reader.reader: reader.failed for reader in result.readers if reader.failed}
    if failed:
        console.print(f"readings that failed, in no mean: {failed}")
    console.print(
        "[low, high]: 95 % bootstrap interval over projects (over tasks below 5 projects); n: denominator", markup=False
    )


def save_evaluation(result: Evaluation, run: Path) -> Path:
    """Writes ``evaluation/<split>.json`` into a run folder."""
    path = run / "evaluation" / f"{result.split}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, result.to_json())
    return path


def _overall(result: Evaluation, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    for reader in result.readers:
        table.add_column(reader.reader, justify="right")
    for metric in SHOWN:
        cells = [str(reader.overall[metric]) if metric in reader.overall else "-" for reader in result.readers]
        table.add_row(metric, *cells)
    return table


def _by_project(reader: ReaderScores) -> Table:
    table = Table(title=f"{reader.reader}, by project", title_justify="left")
    table.add_column("project")
    shown = [metric for metric in SHOWN if metric in reader.overall]
    for metric in shown:
        table.add_column(metric.removeprefix("gates/"), justify="right")
    for project, scores in reader.by_project.items():
        table.add_row(project, *(f"{scores[m].mean:.3f} n={scores[m].count}" if m in scores else "-" for m in shown))
    return table
