"""Sampling from verl's replay buffer: what came back is taken, what never comes ends the run."""

from __future__ import annotations

import asyncio
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import transfer_queue as tq
from omegaconf import OmegaConf
from verl_samples import Client, Output, scored

from poimen_exp.errors import RunFailed
from poimen_exp.gates.types import Prompt, Sampling
from poimen_exp.verl_backend.records import FIELD, pack
from poimen_exp.verl_backend.server import ServerGenerate
from poimen_exp.verl_backend.watch import PhaseClock, naming_the_dead

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's own imports are deprecated ones
    from poimen_exp.verl_backend.replay import GateReplayBuffer

Tags = dict[str, dict[str, Any]]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Tags:
    """Rows of the partition ``train`` by key: what stands in TransferQueue. A row's record is in its tag here."""
    tags: Tags = {}

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        assert (partition_id, select_fields) == ("train", ["extra_fields"])
        return {"extra_fields": [SimpleNamespace(data={FIELD: tags[key]["record"]}) for key in keys]}

    def clear(keys: list[str], partition_id: str) -> None:  # noqa: ARG001
        for key in keys:
            tags.pop(key, None)

    monkeypatch.setattr(tq, "kv_list", lambda *_: {"train": dict(tags)})
    monkeypatch.setattr(tq, "kv_batch_get", get)
    monkeypatch.setattr(tq, "kv_clear", clear)
    return tags


def prompt(queue: Tags, uid: str, status: str) -> None:
    queue[uid] = {"is_prompt": True, "status": status, "global_steps": 1}


def session(queue: Tags, uid: str, number: int, updates: tuple[bool, ...]) -> None:
    """A finished rollout: a row a turn, the record with the last."""
    item = scored(updates, sample=number)
    for place in range(len(updates) + 1):
        queue[f"{uid}_{number}_{place}"] = {"record": pack(item), "seq_len": 7}


def buffer() -> GateReplayBuffer:
    return GateReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.02,
    )


def test_a_failed_rollout_leaves_the_others_of_its_group_in_the_batch(queue: Tags) -> None:
    prompt(queue, "a", "finished")
    session(queue, "a", 0, (True,))
    session(queue, "a", 1, (True, False))
    prompt(queue, "b", "failure")  # session 0 died without a row
    session(queue, "b", 1, (False,))
    taken = buffer()
    batch, _ = taken.sample(global_steps=1, partition_id="train", batch_size=2)
    assert sorted(batch.keys) == ["a_0_0", "a_0_1", "a_1_0", "a_1_1", "a_1_2", "b_1_0", "b_1_1"]
    rolled = taken.batches.pop()
    assert sorted((item.sample, len(item.trajectory.turns)) for item in rolled.scored) == [(0, 2), (1, 2), (1, 3)]
    assert sorted(rolled.row_of) == sorted(batch.keys)


def test_a_group_of_which_nothing_came_back_does_not_keep_the_batch_waiting(queue: Tags) -> None:
    prompt(queue, "a", "finished")
    session(queue, "a", 0, (True,))
    prompt(queue, "b", "failure")
    taken = buffer()
    batch, _ = taken.sample(global_steps=1, partition_id="train", batch_size=2)
    assert sorted(batch.keys) == ["a_0_0", "a_0_1"]


def test_a_step_without_one_finished_rollout_ends_the_run(queue: Tags) -> None:
    prompt(queue, "a", "failure")
    with pytest.raises(RunFailed, match=r"step 1: every rollout failed; .*Error in _run_prompt"):
        buffer().sample(global_steps=1, partition_id="train", batch_size=1)


def test_a_rollout_that_never_comes_back_ends_the_run_within_the_stall_timeout(queue: Tags) -> None:
    prompt(queue, "a", "running")
    waiting = buffer()

    def wait() -> None:
        with PhaseClock(0.3).running() as clock, naming_the_dead(waiting.liveness, clock):
            clock.enter("rollout")
            waiting.sample(global_steps=1, partition_id="train", batch_size=1)

    begun = time.monotonic()
    with pytest.raises(RunFailed, match=r"no end of 'rollout' within 0\.3 s \(rollout\.stall_timeout_s\)") as failure:
        wait()
    assert time.monotonic() - begun < 5
    assert failure.value.exit_code == 1


def test_a_server_that_never_answers_ends_the_run_within_the_turn_timeout(queue: Tags) -> None:
    generate = ServerGenerate(Client(Output([2], [-1.0]), delay_s=60.0), "a", (2,), timeout_s=0.1, own_ids=None)

    async def two_rollouts() -> list[object]:
        turns = [generate(Prompt((1, 2), 1), Sampling(1.0, 1.0, -1, 8)) for _ in range(2)]
        return list(await asyncio.gather(*turns, return_exceptions=True))

    begun = time.monotonic()
    came = asyncio.run(two_rollouts())
    assert all(isinstance(result, TimeoutError) for result in came)
    prompt(queue, "a", "failure")  # verl's word for a group with a session that raised
    with pytest.raises(RunFailed, match="step 1: every rollout failed") as failure:
        buffer().sample(global_steps=1, partition_id="train", batch_size=1)
    assert time.monotonic() - begun < 5
    assert failure.value.exit_code == 1
