"""What the other tests start instead of ``sys.executable`` behaves as it does."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from warm import Warm, warm

SAYS_ALL = """\
import json, os, sys
json.dump([__name__, sys.argv, os.getcwd(), sys.path[0], dict(os.environ), sys.stdin.read()], sys.stdout)
print("and an error", file=sys.stderr)
sys.exit(3)
"""


def test_its_processes_end_though_one_has_just_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as command:
        ended = psutil.Process(command.pid)
    with subprocess.Popen(["sleep", "20"]) as other, warm(tmp_path, ["colorsys"]):
        monkeypatch.setattr(Warm, "processes", lambda _: [ended, psutil.Process(other.pid)])
    assert other.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with warm(tmp_path_factory.mktemp("warm"), ["colorsys"]) as one:
        yield one


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_arguments_folder_environment_streams_and_exit_code_are_the_commands(
    started: Warm, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "told.py"
    file.write_text(SAYS_ALL)
    what = {"-c": ["-c", SAYS_ALL], "-m": ["-m", "told"], "file": [str(file)]}[kind]
    done = subprocess.run(
        [started.python, "-u", *what, "one", "two words"],
        cwd=tmp_path,
        env={"ONLY": "this"},
        input="typed",
        capture_output=True,
        text=True,
        check=False,
    )
    name, (first, *others), folder, path, environment, typed = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (3, "and an error\n")
    assert (name, others, folder, typed) == ("__main__", ["one", "two words"], str(tmp_path), "typed")
    assert (first, path) == (("-c", "") if kind == "-c" else (str(file), str(tmp_path)))
    assert environment["ONLY"] == "this"
    assert "HOME" not in environment


def test_its_modules_are_there_already(started: Warm) -> None:
    code = "import sys; print('colorsys' in sys.modules, 'wave' in sys.modules)"
    assert subprocess.check_output([started.python, "-c", code], text=True) == "True False\n"


def test_a_signal_ends_the_process_and_the_command_alike(started: Warm) -> None:
    assert subprocess.run([started.python, "-c", "import os; os.abort()"], check=False).returncode == -signal.SIGABRT
    code = "import time\ntry: print('now', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: raise SystemExit(7)"
    with subprocess.Popen([started.python, "-c", code], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        command.stdout.readline()
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=30) == 7


def test_a_killed_command_takes_its_process_along(started: Warm) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([started.python, "-c", code], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        process = psutil.Process(int(command.stdout.readline()))
        assert process in started.processes()
        command.kill()
    psutil.wait_procs([process], timeout=30)
    deadline = time.monotonic() + 30
    while started.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started.processes() == []
    assert not process.is_running()
