"""A Python that has torch, transformers, peft and verl imported already: each process of it saves ten seconds.

``python warm_python.py NUMBER MODULE...`` imports the modules once; from then on it forks a process for each command
line that ``warm_command.py`` sends to the socket of that file number. The process runs what ``python ARGUMENT...``
would, with the command's environment, folder and standard streams. The command passes on signals to it, takes it along
when it is killed itself, and ends with its exit code.

Where Ray's variable ``RAY_RUNTIME_ENV_HOOK`` is ``warm_python.warm_workers``, Ray starts its workers by the command.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def warm_workers(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    return {**(runtime_env or {}), "py_executable": os.environ["POIMEN_WARM_PYTHON"]}


def import_all(modules: Sequence[str]) -> None:
    # Ray's core reads these two when it is imported; they are a worker's.
    os.environ["RAY_JOB_ID"] = "01000000"  # of the first driver of a session
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())  # a worker ends with this process, as with its raylet
    gc.disable()  # importing makes no garbage worth looking for
    with warnings.catch_warnings():  # of the libraries
        warnings.simplefilter("ignore")
        for module in modules:
            importlib.import_module(module)
    gc.freeze()
    gc.enable()


def next_command(listener: socket.socket) -> list[str]:
    """The arguments of a command, in a process of its own; in this one it does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _begin(client)
        client.close()


def _begin(client: socket.socket) -> list[str]:
    """Forks once more: the child becomes the command's process; this one tells it signals, and tells of its end."""
    head, streams, _, _ = socket.recv_fds(client, 1, 3)
    with client.makefile("rb") as sent:
        given = json.loads(head + sent.readline())
    pid = os.fork()
    if pid == 0:
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(given["environment"])
        os.chdir(given["folder"])
        arguments: list[str] = given["arguments"]
        return arguments
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    threading.Thread(target=_pass_on, args=(client, pid), daemon=True).start()
    client.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _pass_on(client: socket.socket, pid: int) -> None:
    while number := client.recv(1):
        os.kill(pid, number[0])
    os.kill(pid, signal.SIGKILL)  # the command was killed


def run(arguments: list[str]) -> None:
    """``python ARGUMENT...`` in this process."""
    kind, *rest = [word for place, word in enumerate(arguments) if place or word != "-u"]
    if kind == "-m":
        sys.path[0], sys.argv = str(Path.cwd()), rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0], sys.argv = "", [kind, *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.path[0], sys.argv = str(Path(kind).resolve().parent), [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process would ignore it
    import_all(sys.argv[2:])
    with socket.socket(fileno=int(sys.argv[1])) as server:
        command = next_command(server)
    run(command)
