from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .sweep_bench import Bench, preload


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A working folder; what still runs at the end is killed, joblib's idle workers too."""
    preload()
    made = Bench(tmp_path)
    yield made
    for one in made.started:
        one.kill()
