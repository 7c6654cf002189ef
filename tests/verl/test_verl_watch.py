"""A run that hangs ends."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from poimen_exp.errors import RunFailed
from poimen_exp.verl_backend.watch import PhaseClock


def test_a_phase_that_takes_too_long_ends_the_run_and_names_itself() -> None:
    begun = time.monotonic()

    def hang() -> None:
        with PhaseClock(0.2).running() as clock:
            clock.enter("rollout")
            threading.Event().wait(30)  # a wait inside C, as Ray's is

    with pytest.raises(RunFailed, match=r"no end of 'rollout' within 0\.2 s \(rollout\.stall_timeout_s\)"):
        hang()
    assert time.monotonic() - begun < 5


def test_a_phase_that_ends_in_time_leaves_the_next_one_its_whole_limit() -> None:
    with PhaseClock(3600.0).running() as clock:
        for phase in ("rollout", "update", "weight sync"):
            signal.setitimer(signal.ITIMER_REAL, 60.0)  # as if the phase before had taken 59 minutes
            clock.enter(phase)
            left, _ = signal.getitimer(signal.ITIMER_REAL)
            assert 3000 < left <= 3600


def test_the_alarm_is_as_before_after_the_run() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with PhaseClock(60.0).running():
        assert signal.getsignal(signal.SIGALRM) != before
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_outside_the_main_thread_there_is_no_alarm_and_the_run_says_so() -> None:
    heard: list[BaseException] = []

    def begin() -> None:
        try:
            with PhaseClock(1.0).running():
                pass
        except RunFailed as error:
            heard.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert "main thread" in str(heard[0])
