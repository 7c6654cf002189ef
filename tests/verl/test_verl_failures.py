"""A run whose sampling server dies ends with exit 1 and names it, instead of waiting for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from poimen_exp.tracking.metrics_log import read_metrics

pytestmark = [pytest.mark.verl, pytest.mark.slow]

START_S, END_S = 900, 120


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of many steps, past its first validation."""
    path = tmp_path / "run"
    more = ("trainer.total_training_steps=200", "tracking.wandb=disabled", f"hydra.run.dir={path}")
    output = (tmp_path / "output").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "poimen_exp", "+experiment=verl_smoke", *more],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        wait_for_step(process, path / "metrics.jsonl", 0)
        yield process, tmp_path / "output"
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()
        output.close()


def wait_for_step(process: subprocess.Popen[str], record: Path, step: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before its first step"
        if any(line.step >= step for line in read_metrics(record).lines):
            return
        time.sleep(1)
    pytest.fail(f"no step {step} within {START_S} s")


def server_of(process: subprocess.Popen[str]) -> psutil.Process:
    children = psutil.Process(process.pid).children(recursive=True)
    found = [child for child in children if any("ray::Server" in part for part in child.cmdline())]
    assert len(found) == 1, [child.cmdline()[:1] for child in children]
    return found[0]


def test_a_dead_server_ends_the_run_with_exit_1_and_its_name(running: tuple[subprocess.Popen[str], Path]) -> None:
    process, output = running
    server_of(process).kill()
    begun = time.monotonic()
    assert process.wait(timeout=END_S) == 1
    assert time.monotonic() - begun < END_S
    said = output.read_text()
    assert "poimen_exp: " in said
    assert "server 0 died" in said or "rollouts failed" in said, said[-3000:]
