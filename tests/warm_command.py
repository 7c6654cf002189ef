"""``python -IS warm_command.py SOCKET ARGUMENT...``: ``python ARGUMENT...`` by the process of ``warm_python.py``."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main(path: str, arguments: list[str]) -> int:
    """The exit code of what is run; negative for the signal that ended it."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        given = {"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())}
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        text = json.dumps(given).encode() + b"\n"
        socket.send_fds(server, [text[:1]], [0, 1, 2])
        server.sendall(text[1:])
        with server.makefile("rb") as answer:
            line = answer.readline()
    return int(line) if line else 1


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
