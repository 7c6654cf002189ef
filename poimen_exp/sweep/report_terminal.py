"""A report on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from poimen_exp.sweep.records import label
from poimen_exp.sweep.report import Report, difference_cells, headings, table_cells
from poimen_exp.wording import wide_console


def print_report(report: Report, paths: Sequence[Path], console: Console | None = None) -> None:
    """Prints notes, tables, verdict and where the files are."""
    console = console or wide_console()
    for note in report.notes:
        console.print(escape(note), style="yellow" if note.startswith("UNFINISHED") else "")
    console.print(_table("settings", headings(report.rows), table_cells(report.rows)))
    for comparison in report.comparisons:
        title = f"{label(comparison.second)} minus {label(comparison.first)}, paired by seed"
        console.print(_table(title, ["metric", "difference, 95 % bootstrap", "seeds"], difference_cells(comparison)))
    console.print(escape(report.verdict), style="bold")
    console.print("wrote", " ".join(escape(str(path)) for path in paths))


def _table(title: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in head:
        table.add_column(escape(column))
    for row in cells:
        table.add_row(*(escape(cell) for cell in row))
    return table
