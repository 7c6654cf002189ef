"""Ends a run that hangs: a deadline for every phase, a look at the workers while waiting, and the name of who died."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from poimen_exp.errors import RunFailed

_AGAIN_S = 15.0
"""The alarm repeats at this interval: code that swallows the first exception meets the next."""

_LAST_LOOK_S = 15.0
"""A run that fails anyway waits this long for its workers' answers, to name a dead one."""

_END_S = 60.0
"""What a failed run has for that look and for closing Ray; after it, exit 1 without."""


class PhaseClock:
    """One deadline at a time, kept by the process's alarm: it reaches a main thread that waits inside Ray.

    Args:
        limit_s: seconds a phase may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._longest_s, self._limit_s = limit_s, limit_s
        self._phase, self._why = "start", ""

    def enter(self, phase: str) -> None:
        """Starts ``phase`` and its deadline; the phase before is over."""
        self._start(phase, self._longest_s)

    def end(self, why: str) -> None:
        """Starts the end of a run that failed: it has a minute, however long a phase may take."""
        self._why = why
        self._start("the end of the run", _END_S)

    def _start(self, phase: str, limit_s: float) -> None:
        self._phase, self._limit_s = phase, limit_s
        signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)

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
        if self._why:
            raise RunFailed(f"{self._why}; and Ray could not be closed within {self._limit_s:g} s")
        raise RunFailed(
            f"verl: no end of '{self._phase}' within {self._limit_s:g} s (rollout.stall_timeout_s): a worker or a "
            "server hangs; see the Ray workers' log, or raise the limit if this phase is meant to take longer"
        )


@dataclass(frozen=True)
class Look:
    """What a look at the workers found.

    Attributes:
        dead: name of the first one known to be dead, with Ray's word for it; None where none is.
        silent: names of those that did not answer in time: busy, or hung.
    """

    dead: str | None
    silent: tuple[str, ...]


class Liveness:
    """Pings actors without waiting for busy ones."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._pings: dict[str, Any] = {}

    def watch(self, actors: Mapping[str, Any]) -> None:
        """Adds actors: name in messages to Ray actor handle."""
        self._actors.update(actors)

    def check(self) -> None:
        """Raises ``RunFailed`` for an actor known to be dead. A busy actor's ping stays out until it answers."""
        for name, actor in self._actors.items():
            if name not in self._pings:
                self._pings[name] = actor.__ray_ready__.remote()
        dead = self._collect(self._pings, 0.0)
        if dead is not None:
            raise RunFailed(f"verl: {dead}")

    def look(self, wait_s: float = _LAST_LOOK_S) -> Look:
        """Pings everyone anew (an older ping may have been answered before its actor died), and waits for the answers.

        Args:
            wait_s: longest wait; a dead actor ends it at once.
        """
        pings = {name: actor.__ray_ready__.remote() for name, actor in self._actors.items()}
        deadline = time.monotonic() + wait_s
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            dead = self._collect(pings, left)  # the last time behind the deadline, also after a pause
            if dead is not None:
                return Look(dead, ())
            if not pings or left == 0.0:
                return Look(None, tuple(pings))

    def _collect(self, pings: dict[str, Any], wait_s: float) -> str | None:
        """Takes out the pings answered so far, at least one unless ``wait_s`` ends; who died, if one did."""
        import ray

        if not pings:
            return None
        answered, _ = ray.wait(list(pings.values()), num_returns=1 if wait_s else len(pings), timeout=wait_s)
        for name in [name for name, ping in pings.items() if ping in answered]:
            try:
                ray.get(pings.pop(name))
            except ray.exceptions.RayError as error:
                return f"{name} died: {_line(error, 0)}"
        return None


@contextmanager
def naming_the_dead(liveness: Liveness, clock: PhaseClock) -> Iterator[None]:
    """Turns any error inside the block into one that names a dead worker or server, if there is one.

    Whoever notices first raises: the ping, the trainer's own call, the count of failed rollouts, TransferQueue. What
    the user needs to know is the same each time.

    Raises:
        RunFailed: who died (or did not answer), then what the run met.
    """
    import ray

    try:
        yield
    except Exception as error:
        met = str(error) if isinstance(error, RunFailed) else _told(error)
        clock.end(met)
        found = liveness.look()
        if found.dead is not None and found.dead not in met:
            raise RunFailed(f"verl: {found.dead}; what the run met: {met}") from error
        if not isinstance(error, RunFailed | ray.exceptions.RayError):
            raise
        silent = f"; no answer within {_LAST_LOOK_S:g} s from {', '.join(found.silent)} (busy or hung)"
        raise RunFailed(met + (silent if found.silent else "")) from error


def _told(error: Exception) -> str:
    return f"verl: a worker failed: {type(error).__name__}: {_line(error, -1)}"


def _line(error: Exception, place: int) -> str:
    """The first or last line of what an error says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[place].strip() if lines else type(error).__name__
