"""Numbers as a person reads them, and the console they are printed on."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

NO_PROGRESS_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "1")
"""transformers reads it when it is imported, in this process and in those that it starts."""
_NO_TERMINAL = 10_000
"""Columns where nobody's window bounds a line: in a pipe or a file nothing is cut or folded."""


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 field``, ``2,000 fields``; ``plural`` where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def meant(name: str, names: Iterable[str], before: str = "") -> str:
    """``; did you mean BEFORE and NAME?`` of the name that is spelt alike; nothing where none is."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {before}{near[0]}?" if near else ""


def size(count: float) -> str:
    """Bytes as ``1.53 GB`` (of 2^30), below 0.1 GB as ``23.4 MB``."""
    return f"{count / 2**30:.2f} GB" if count >= 0.1 * 2**30 else f"{count / 2**20:.3g} MB"


def seconds(count: float) -> str:
    """``0.28 s``, ``42 s``."""
    return f"{count:.0f} s" if count >= 10 else f"{count:.2g} s"


def hours(count_s: float) -> str:
    """Seconds as ``1.5 h``, below 0.1 h as seconds."""
    return seconds(count_s) if count_s < 360 else f"{count_s / 3600:.2g} h"


def no_progress_bars() -> None:
    """Keeps transformers' bar, which every load of a model draws, out of the log; a value that is set stays."""
    os.environ.setdefault(*NO_PROGRESS_BARS)


def wide_console() -> Console:
    """Standard output: as wide as the terminal, or as whatever is printed where it is none."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _NO_TERMINAL)
