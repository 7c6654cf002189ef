"""Starts sweeps of the fake application in processes forked from one that has the imports behind it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PRELOADED = ("fake_app", "poimen_exp.sweep.run", "alembic.command", "optuna.storages._rdb.models")


def _child(arguments: list[str], environment: dict[str, str], output: str) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    os.chdir(environment["FAKE_CWD"])
    sys.argv = [str(HERE / "fake_app.py"), *arguments]
    import fake_app

    # Not the child's own ending: it would wait for joblib's manager thread, which only a real interpreter exit ends.
    os._exit(_exit_code(fake_app.program))


def _exit_code(program: Callable[[], None]) -> int:
    try:
        program()
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


@dataclass
class Started:
    """A fake sweep in its own process group."""

    process: Any
    output: Path

    def wait(self) -> int:
        """Its exit code."""
        self.process.join(180)
        assert self.process.exitcode is not None, f"still running after 180 s: {self.text}"
        return int(self.process.exitcode)

    def kill(self) -> None:
        """``kill -9`` to it and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.join()

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.process.pid, signal.SIGINT)

    @property
    def code(self) -> int:
        """Its exit code, when it has ended."""
        return self.wait()

    @property
    def text(self) -> str:
        """What it printed, on one line a paragraph."""
        return self.output.read_text() if self.output.exists() else ""


@dataclass
class Bench:
    """A working folder in which sweeps are started."""

    folder: Path
    started: list[Started] = field(default_factory=list)

    def start(self, *arguments: str, **environment: str) -> Started:
        """Starts ``fake_app --multirun ARGUMENTS``; environment names lose their ``FAKE_``."""
        output = self.folder / f"output-{len(self.started)}"
        values = {f"FAKE_{name}": value for name, value in environment.items()}
        values |= {"FAKE_LOG": str(self.folder / "log"), "FAKE_CWD": str(self.folder)}
        values |= {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "COLUMNS": "200"}
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_child, args=(["--multirun", *arguments], values, str(output)))
        process.start()
        self.started.append(Started(process, output))
        return self.started[-1]

    def sweep(self, *arguments: str, **environment: str) -> Started:
        """Runs a sweep to its end."""
        one = self.start(*arguments, **environment)
        one.wait()
        return one

    def log(self, kind: str) -> list[list[Any]]:
        """What the fake application noted: ``gate`` or ``run`` lines."""
        path = self.folder / "log"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line[1:] for line in lines if line[0] == kind]

    def runs(self) -> list[tuple[str, str]]:
        """Alpha and seed of each trial that began, in order of time, as Python spells them."""
        return [(alpha, seed) for _, alpha, seed, _ in self.log("run")]

    def sweeps(self) -> list[Path]:
        """Folders of sweeps."""
        return sorted(path.parent for path in self.folder.glob("multirun/fake/*/sweep.json"))


def preload() -> None:
    """Names what the parent of all fake sweeps imports, once."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    """Returns when the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
