"""A process that ends while the others are looked at keeps nobody from looking at them and from ending them."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import verl_runs


@pytest.fixture
def ended() -> psutil.Process:
    with subprocess.Popen(["true"]) as command:
        return psutil.Process(command.pid)


def test_what_a_command_started_ends_with_it(
    ended: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "20"]) as child:
        monkeypatch.setattr(verl_runs, "descendants", lambda _: [ended, psutil.Process(child.pid)])
        with verl_runs.started("sleep", "20", output=tmp_path / "output", more={}) as process:
            pass
    assert (child.returncode, process.returncode) == (-signal.SIGKILL, -signal.SIGKILL)


def test_the_server_is_found(ended: psutil.Process) -> None:
    with subprocess.Popen(["sh", "-c", "read line", "ray::Server"], stdin=subprocess.PIPE) as command:
        server = psutil.Process(command.pid)
        assert verl_runs.server_of([ended, psutil.Process(), server]) == server


def test_those_still_alive_are_named_and_end(ended: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "wait_procs", lambda processes, timeout: ([], processes))  # noqa: ARG005
    with subprocess.Popen(["sleep", "20"]) as command:
        assert verl_runs.alive([ended, psutil.Process(command.pid)], wait_s=0.0) == ("sleep",)
    assert command.returncode == -signal.SIGKILL
