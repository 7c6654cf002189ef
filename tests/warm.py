"""Starts ``warm_python.py`` with what a run imports, verl's on a CPU too, for tests that start many processes.

A test whose point is a new process, its imports or its environment starts ``sys.executable``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parent
ON_A_CPU = {"TRANSFER_QUEUE_ENABLE": "1", "VERL_USE_EXTERNAL_MODULES": "poimen_exp.verl_backend.cpu_platform"}
"""What verl reads when it is imported (``verl_backend/launch.py``)."""
MODULES = (
    "peft",
    "transformers.models.qwen2.modeling_qwen2",
    "verl.trainer.main_ppo",
    "verl.workers.engine_workers",
    "poimen_exp.verl_backend.agent_loop",
    "poimen_exp.verl_backend.cpu_rollout",
    "poimen_exp.verl_backend.trainer",
)


@dataclass(frozen=True)
class Warm:
    """A started one.

    Attributes:
        python: a command to be used as ``sys.executable`` is.
    """

    python: Path
    process: subprocess.Popen[bytes]

    def for_ray(self) -> dict[str, str]:
        """Environment in which Ray starts its workers so."""
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        hook = {"RAY_RUNTIME_ENV_HOOK": "warm_python.warm_workers", "POIMEN_WARM_PYTHON": str(self.python)}
        return {**hook, "PYTHONPATH": path}

    def processes(self) -> list[psutil.Process]:
        """Those that run now."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def warm(folder: Path, modules: Sequence[str] = MODULES) -> Iterator[Warm]:
    """Its socket and its command lie in ``folder``; commands that come before it has imported everything wait."""
    python, path = folder / "python", folder / "socket"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {HERE / "warm_command.py"} {path} "$@"\n')
    python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, **ON_A_CPU, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        command = [sys.executable, str(HERE / "warm_python.py"), str(listener.fileno()), *modules]
        started = Warm(python, subprocess.Popen(command, env=environment, pass_fds=[listener.fileno()]))
    try:
        yield started
    finally:
        for process in started.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        started.process.kill()
        started.process.wait()
