"""Whoever notices first, a run that lost a worker says which."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from poimen_exp.errors import RunFailed
from poimen_exp.verl_backend import watch
from poimen_exp.verl_backend.watch import Liveness, PhaseClock, naming_the_dead


class Ping:
    def __init__(self, actor: Actor) -> None:
        self.actor, self.died = actor, actor.dead


class Actor:
    """An actor whose pings are answered at once, as it was when they were sent; a busy one's are not."""

    def __init__(self, *, dead: bool = False, busy: bool = False) -> None:
        self.dead, self.busy = dead, busy
        self.__ray_ready__ = SimpleNamespace(remote=lambda: Ping(self))


@pytest.fixture(autouse=True)
def rays(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(pings: list[Ping], num_returns: int, timeout: float) -> tuple[list[Ping], list[Ping]]:
        ready = [ping for ping in pings if not ping.actor.busy][:num_returns]
        if not ready:
            time.sleep(timeout)
        return ready, [ping for ping in pings if ping not in ready]

    def get(ping: Ping) -> None:
        if ping.died:
            raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)


def watching(**actors: Actor) -> Liveness:
    liveness = Liveness()
    liveness.watch(actors)
    return liveness


@pytest.fixture
def clock() -> Iterator[PhaseClock]:
    with PhaseClock(60.0).running() as clock:
        yield clock


def test_a_poll_ends_the_run_when_a_worker_is_dead_and_never_waits_for_a_busy_one() -> None:
    server, busy = Actor(), Actor(busy=True)
    liveness = watching(server=server, busy=busy)
    begun = time.monotonic()
    liveness.check()
    server.dead = True
    with pytest.raises(RunFailed, match="verl: server died: "):
        liveness.check()
    assert time.monotonic() - begun < 1


def test_an_answer_from_before_its_death_does_not_clear_a_dead_server() -> None:
    server = Actor(busy=True)
    liveness = watching(server=server)
    liveness.check()  # this ping is out, and will be answered as alive
    server.busy, server.dead = False, True
    assert str(liveness.look().dead).startswith("server died: ")


def test_a_dead_worker_is_found_though_others_never_answer() -> None:
    begun = time.monotonic()
    look = watching(worker=Actor(busy=True), server=Actor(dead=True)).look(wait_s=30.0)
    assert str(look.dead).startswith("server died: ")
    assert time.monotonic() - begun < 5


def test_those_that_do_not_answer_in_time_are_named_as_silent() -> None:
    look = watching(worker=Actor(), server=Actor(busy=True)).look(wait_s=0.05)
    assert (look.dead, look.silent) == (None, ("server",))


def test_after_a_pause_longer_than_the_wait_the_answers_that_are_there_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def paused() -> SimpleNamespace:
        return SimpleNamespace(monotonic=count(0.0, 60.0).__next__)  # a minute passes between two looks at the clock

    monkeypatch.setattr(watch, "time", paused())
    look = watching(worker=Actor(), other=Actor(), server=Actor(busy=True)).look(wait_s=30.0)
    assert (look.dead, look.silent) == (None, ("server",))
    monkeypatch.setattr(watch, "time", paused())
    assert str(watching(server=Actor(dead=True)).look(wait_s=30.0).dead).startswith("server died: ")


@pytest.mark.parametrize(
    "met",
    [
        RunFailed("step 1: every rollout failed"),
        RunFailed("step 1: 2 of 4 rollouts failed, above rollout.max_failed=0.1"),
        RunFailed("verl: no end of 'update' within 5 s"),
        ray.exceptions.RayError("the actor is gone"),
        TimeoutError("a storage unit did not answer"),
    ],
    ids=["rollouts", "failed share", "deadline", "Ray", "TransferQueue"],
)
def test_whatever_the_run_meets_first_the_dead_server_is_named(clock: PhaseClock, met: Exception) -> None:
    def meet() -> None:
        with naming_the_dead(watching(worker=Actor(), server_0=Actor(dead=True)), clock):
            raise met

    with pytest.raises(RunFailed, match=r"^verl: server_0 died: .*; what the run met: ") as failure:
        meet()
    assert str(met) in str(failure.value)


def test_a_run_that_fails_with_all_workers_alive_says_what_it_met(clock: PhaseClock) -> None:
    def meet(error: Exception) -> None:
        with naming_the_dead(watching(worker=Actor()), clock):
            raise error

    with pytest.raises(RunFailed, match=r"^step 1: every rollout failed$"):
        meet(RunFailed("step 1: every rollout failed"))
    with pytest.raises(RunFailed, match=r"^verl: a worker failed: RayError: RuntimeError: weight sync: 0 tensors$"):
        meet(ray.exceptions.RayError("Traceback\n  somewhere\nRuntimeError: weight sync: 0 tensors\n"))
    with pytest.raises(KeyError):  # an error of the program keeps its traceback
        meet(KeyError("x"))


def test_a_failed_run_has_a_minute_to_close_ray_however_long_a_phase_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_END_S", 0.2)

    def hang() -> Any:
        with PhaseClock(1800.0).running() as clock, naming_the_dead(watching(worker=Actor(busy=True)), clock):
            raise RunFailed("step 1: every rollout failed")

    begun = time.monotonic()
    with pytest.raises(RunFailed, match=r"every rollout failed; and Ray could not be closed within 0\.2 s"):
        hang()
    assert time.monotonic() - begun < 5
