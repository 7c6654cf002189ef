"""Ends a run that hangs: a deadline for every phase, and a look at the workers while waiting for rollouts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from poimen_exp.errors import RunFailed

_AGAIN_S = 15.0
"""The alarm repeats at this interval: code that swallows the first exception meets the next."""


class PhaseClock:
    """One deadline at a time, kept by the process's alarm: it reaches a main thread that waits inside Ray.

    Args:
        limit_s: seconds a phase may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._phase = limit_s, "start"

    def enter(self, phase: str) -> None:
        """Starts ``phase`` and its deadline; the phase before is over."""
        self._phase = phase
        signal.setitimer(signal.ITIMER_REAL, self._limit_s, _AGAIN_S)

    @contextmanager
    def running(self) -> Iterator[PhaseClock]:
        """Deadlines hold inside the block; the alarm and its handler are as before after it."""
        if threading.current_thread() is not threading.main_thread():
            raise RunFailed("backend=verl: runs in a process's main thread only (its deadlines use the process alarm)")
        before = signal.signal(signal.SIGALRM, self._expired)
        try:
            self.enter("start")
            yield self
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    def _expired(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        raise RunFailed(
            f"verl: no end of '{self._phase}' within {self._limit_s:g} s (rollout.stall_timeout_s): a worker or a "
            "server hangs; see the Ray workers' log, or raise the limit if this phase is meant to take longer"
        )


class Liveness:
    """Pings actors without waiting for busy ones.

    Args:
        actors: name in messages to Ray actor handle.
    """

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self._actors = dict(actors)
        self._pings: dict[str, Any] = {}

    def check(self, wait_s: float = 0.0) -> None:
        """Raises ``RunFailed`` for the first actor known to be dead. A busy actor's ping stays out until it answers.

        Args:
            wait_s: longest wait for the answers.
        """
        import ray

        for name, actor in self._actors.items():
            if name not in self._pings:
                self._pings[name] = actor.__ray_ready__.remote()
        pings = {ping: name for name, ping in self._pings.items()}
        if not pings:
            return
        answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=wait_s)
        for ping in answered:
            name = pings[ping]
            del self._pings[name]
            try:
                ray.get(ping)
            except ray.exceptions.RayError as error:
                raise RunFailed(f"verl: {name} died: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
