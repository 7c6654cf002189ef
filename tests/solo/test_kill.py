"""A run killed by the operating system goes on by ``poimen resume`` as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from warm import Warm

from poimen_exp.tracking.result import read_result

from .run_support import SMALL, small_corpus, small_settings
from .test_resume import lines

pytestmark = pytest.mark.slow
START_S = 600
STEPS = 6
"""Four of them after the checkpoint that the killer waits for: time for it to wake on a busy machine."""


def command(python: str, corpus: Path, folder: Path, steps: int) -> list[str]:
    """A small run of the command line by a Python; ``split_seed`` is the one that trains on the larger project."""
    seed = small_settings(corpus).corpus.split_seed
    more = (f"corpus.path={corpus}", f"corpus.split_seed={seed}", f"trainer.total_training_steps={steps}")
    return [python, "-m", "poimen_exp", *SMALL, *more, "tracking=none", f"hydra.run.dir={folder}"]


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def kill_after(process: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    """SIGKILL as soon as the checkpoint of ``step`` is complete: in the middle of whatever comes next."""
    deadline = time.monotonic() + START_S
    while not (folder / f"checkpoints/global_step_{step}/manifest.json").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that do not outlive the test."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_kill_9_loses_at_most_the_steps_since_the_last_save(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], warm_python: Warm
) -> None:
    corpus = small_corpus(tmp_path / "corpus")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    warm = str(warm_python.python)
    started += [start(command(warm, corpus, straight, STEPS)), start(command(sys.executable, corpus, killed, STEPS))]
    kill_after(started[1], killed, 2)
    assert read_result(killed / "result.json") is None
    assert started[0].wait() == 0
    resume = "import sys; from poimen_exp.cli import main; sys.argv = ['poimen', 'resume', sys.argv[1]]; main()"
    started.append(start([warm, "-c", resume, str(killed)]))
    assert started[2].wait() == 0
    result = read_result(killed / "result.json")
    assert result is not None
    assert (result.status, result.step) == ("completed", STEPS)
    assert lines(killed) == lines(straight)
    for name in ("adapter.safetensors", "optimizer.pt", "rng.pt", "progress.json"):
        file = f"checkpoints/global_step_{STEPS}/{name}"
        assert (killed / file).read_bytes() == (straight / file).read_bytes(), name
