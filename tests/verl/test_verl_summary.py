"""What scripts/verl_summary.py tells of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from poimen_exp.tracking.metrics_log import MetricLine

SCRIPT = Path(__file__).parents[2] / "scripts" / "verl_summary.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verl_summary", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(step: int, **seconds: float) -> MetricLine:
    return MetricLine(step, float(step), {f"timing_s/{name}": value for name, value in seconds.items()}, {})


def test_the_first_step_stands_apart_from_the_mean_of_the_later_ones(script: ModuleType) -> None:
    lines = [line(0, testing=99.0), line(1, gen=10.0), line(2, gen=2.0, testing=5.0), line(3, gen=4.0)]
    summary = script.summarise(lines)
    assert summary["timing_s/gen"] == {"first": 10.0, "later_mean": 3.0, "later": 2}
    assert summary["timing_s/testing"] == {"first": 5.0, "later_mean": 5.0, "later": 1}  # step 0 is no training step
    assert set(summary) == {"timing_s/gen", "timing_s/testing"}
    assert "| rollout, s | 10 | 3 | 2 |" in script.table(summary)
