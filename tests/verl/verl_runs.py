"""Commands of the verl backend as a user types them, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from poimen_exp.tracking.metrics_log import MetricLine, by_step, read_metrics
from poimen_exp.tracking.run_folder import RunFolder

RUN = (sys.executable, "-m", "poimen_exp")
POIMEN = ("-c", "from poimen_exp.cli import main; main()")
"""Arguments of a Python."""
START_S = 600
"""Longest wait for a run's first step: on two cores that others use, Ray's eight processes import verl for minutes."""


@dataclass(frozen=True)
class Ended:
    """A finished command.

    Attributes:
        lines: what the run's record held then.
        seconds: from the last thing done to the process to its end.
        left_behind: names of processes that the run started and that outlived it.
    """

    folder: RunFolder
    code: int
    output: str
    lines: Mapping[int, MetricLine]
    seconds: float
    left_behind: tuple[str, ...] = ()


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, with bytecode caches: each of Ray's processes imports verl, and compiling it takes 20 s."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **(more or {})}


def lines_of(path: Path) -> dict[int, MetricLine]:
    return by_step(read_metrics(path / "metrics.jsonl").lines)


def finish(*arguments: str, path: Path) -> Ended:
    """Runs a command on the run folder ``path`` to its end."""
    begun = time.monotonic()
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=900, env=environment(), check=False)
    output = done.stdout + done.stderr
    return Ended(RunFolder(path, None), done.returncode, output, lines_of(path), time.monotonic() - begun)


@contextmanager
def started(*arguments: str, output: Path, more: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A command that runs beside the test, with everything that it starts; all of it is gone after the block.

    Args:
        more: environment that is added to this process's.
    """
    with output.open("w") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, text=True, env=environment(more))
        try:
            yield process
        finally:
            kill(descendants(process))
            process.kill()
            process.wait()


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def server_of(processes: Iterable[psutil.Process]) -> psutil.Process:
    """The one sampling server among them."""
    commands = {process: _command(process) for process in processes}
    found = [process for process, command in commands.items() if any("ray::Server" in part for part in command)]
    assert len(found) == 1, [command[:1] for command in commands.values()]
    return found[0]


def _command(process: psutil.Process) -> list[str]:
    """Empty where the process has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def wait_for(process: subprocess.Popen[str], file: Path) -> None:
    """Waits until the run has written ``file``."""
    deadline = time.monotonic() + START_S
    while not file.exists():
        assert process.poll() is None, f"the run ended before it wrote {file}"
        assert time.monotonic() < deadline, f"no {file} within {START_S} s"
        time.sleep(0.2)


def alive(processes: list[psutil.Process], wait_s: float) -> tuple[str, ...]:
    """Names of those that still run after ``wait_s``; they are killed."""
    _, left = psutil.wait_procs(processes, timeout=wait_s)
    names = []
    for process in left:
        with suppress(psutil.NoSuchProcess):  # it has ended a moment ago
            names.append(process.name())
    kill(left)
    return tuple(names)
