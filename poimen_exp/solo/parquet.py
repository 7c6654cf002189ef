"""Parquet files as lists of plain rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poimen_exp.errors import Refused


def read_rows(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Column names and rows.

    Raises:
        Refused: not readable as Parquet.
    """
    import pyarrow
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise Refused(f"{path}: not readable as Parquet: {str(error).splitlines()[0]}") from error
    return list(table.column_names), table.to_pylist()


def row_count(path: Path) -> int:
    """Number of rows, from the file's footer.

    Raises:
        Refused: not readable as Parquet.
    """
    import pyarrow
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise Refused(f"{path}: not readable as Parquet: {str(error).splitlines()[0]}") from error


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows of equal keys; the same rows give the same bytes under one version of the library."""
    import pyarrow
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
