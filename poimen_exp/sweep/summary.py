"""The table of all trials that ends a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from poimen_exp.tracking.result import OBJECTIVE
from poimen_exp.wording import wide_console

if TYPE_CHECKING:
    from poimen_exp.sweep.study import TrialRow


def print_summary(rows: Sequence[TrialRow], folder: Path, console: Console | None = None) -> None:
    """Prints every trial of the study with its state, failed and repeated ones too, and what reports on them."""
    console = console or wide_console()
    keys = sorted({key for row in rows for key in row.point})
    table = Table()
    for column in ("trial", *keys, "state", f"{OBJECTIVE}, best", "folder / reason"):
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = [row.point.get(key, "") for key in keys]
        value = "" if row.value is None else f"{row.value:.4f}"
        table.add_row(*(escape(c) for c in (str(row.number), *cells, row.state, value, _where(row, folder))))
    console.print(f"trials of {folder}", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    if any(row.value is not None for row in rows):
        console.print(f"poimen report {shlex.quote(str(folder))}", markup=False, highlight=False, soft_wrap=True)


def _where(row: TrialRow, folder: Path) -> str:
    near = row.folder.is_relative_to(folder)
    place = str(row.folder.relative_to(folder)) if near else str(row.folder)
    return f"{place}  {row.reason}".rstrip()
