"""Runs the program's command line several times, four at once, in processes forked from this one.

What this one has imported (torch, transformers, peft, verl: ten seconds) none of them imports again. Its argument is a
JSON list of [arguments, output file]; its exit code is the first of theirs that is not 0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence

from poimen_exp.__main__ import main

AT_ONCE = 4


def run_all(jobs: Iterable[tuple[Sequence[str], str]]) -> int:
    """The first exit code that is not 0, or 0; jobs that have begun are waited for."""
    running: set[int] = set()
    codes = [0]
    for arguments, output in jobs:
        if len(running) == AT_ONCE:
            codes.append(_wait(running))
        if any(codes):
            break
        pid = os.fork()
        if pid == 0:
            _child(arguments, output)
        running.add(pid)
    while running:
        codes.append(_wait(running))
    return next(filter(None, codes), 0)


def _wait(running: set[int]) -> int:
    pid, status = os.wait()
    running.remove(pid)
    return os.waitstatus_to_exitcode(status)


def _child(arguments: Sequence[str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        code = main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    import peft  # noqa: F401

    from poimen_exp.gates.check_step import import_engines

    import_engines()
    sys.exit(run_all(json.loads(sys.argv[1])))
