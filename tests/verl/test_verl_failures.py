"""A run whose sampling server dies ends with exit 1 and names it, and goes on later from its checkpoint."""

from __future__ import annotations

import json

import pytest
from verl_runs import Ended

from poimen_exp.tracking.result import read_result
from poimen_exp.verl_backend.export import lora_tensors

pytestmark = [pytest.mark.verl, pytest.mark.slow]

END_S = 120
"""Promised in docs/scale.md. Most of it is for a machine that has other work."""


def test_a_resumed_run_goes_on_where_it_stopped(trained: Ended, killed: Ended) -> None:
    assert f"going on from {trained.folder.checkpoint(3)}" in killed.output
    assert list(killed.lines)[:5] == [0, 1, 2, 3, 4]
    for step in range(4):
        assert killed.lines[step] == trained.lines[step]
    progress = json.loads((killed.folder.checkpoint(4) / "progress.json").read_text())
    # 2 optimizer steps a step; the 4 prompts of a step are new ones: the data cursor went on.
    assert (progress["step"], progress["optimizer_steps"], progress["groups"]) == (4, 8, 16)
    assert killed.lines[4].metrics["training/sync/trainer_base_diff"] > 1e-3  # the adapter came back
    before, after = (lora_tensors(killed.folder.checkpoint(step) / "actor") for step in (3, 4))
    assert any(bool((before[name] != after[name]).any()) for name in before)


def test_a_dead_server_ends_the_run_with_exit_1_and_its_name_in_time(killed: Ended) -> None:
    assert killed.code == 1
    assert killed.seconds < END_S
    last = [line for line in killed.output.splitlines() if line.startswith("poimen: ")]
    assert last, killed.output[-3000:]
    assert "server 0 died: " in last[-1]


def test_a_failed_run_leaves_no_process_behind(killed: Ended) -> None:
    assert killed.left_behind == ()


def test_a_failed_run_is_finished_from_its_checkpoint_without_a_server(killed: Ended, finished: Ended) -> None:
    result = read_result(finished.folder.result)
    assert result is not None
    assert (result.status, result.step) == ("completed", 4)
    assert list(finished.lines) == [0, 1, 2, 3, 4]  # what came after the checkpoint is dropped
    assert finished.lines[4] == killed.lines[4]
