"""``trajectories/step_N.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from poimen_exp.errors import RunFailed
from poimen_exp.tracking.trajectories import read_trajectories, write_trajectories

from .support import rollout


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    records = [rollout(3, 0, (1.0, 0.5)), rollout(3, 1, (None, None))]
    write_trajectories(tmp_path / "step_3.jsonl", records)
    assert list(read_trajectories(tmp_path / "step_3.jsonl")) == records
    lines = (tmp_path / "step_3.jsonl").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3  # two rollouts and the end: a line separator inside a text is no new line
    first = json.loads(lines[0])
    assert (first["step"], first["policy_version"], first["group"], first["sample"]) == (3, 2, 0, 0)
    assert first["turns"][0]["chunk"] == 0
    assert first["turns"][1]["chunk"] is None
    assert first["turns"][1]["response_ids"] == [0, 1, 2]
    assert first["turns"][1]["log_probs"] == [-0.5, -0.5, -0.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_and_the_rollout_named(tmp_path: Path, value: float) -> None:
    good, path = rollout(3, 0, (1.0, 0.5)), tmp_path / "step_3.jsonl"
    bad_reward = msgspec.structs.replace(good, rewards={"total": value})
    with pytest.raises(RunFailed, match=r"reward/total of rollout 0 of group 0 \(task t1\) at step 3: got"):
        write_trajectories(path, [good, bad_reward])
    with pytest.raises(RunFailed, match=r"at chunk 0 of rollout 0 of group 0"):
        write_trajectories(path, [rollout(3, 0, (value, 0.5))])
    log_probs = msgspec.structs.replace(good.turns[1], log_probs=(-0.5, -value, 0.0))
    with pytest.raises(RunFailed, match=r"at the answer of rollout 0"):
        write_trajectories(path, [msgspec.structs.replace(good, turns=(log_probs,))])
    assert not path.exists()


def test_every_id_has_its_log_prob(tmp_path: Path) -> None:
    good = rollout(3, 0, (1.0, 0.5))
    short = msgspec.structs.replace(good.turns[0], log_probs=(-0.5,))
    with pytest.raises(RunFailed, match=r"chunk 0 of .*2 ids and 1 log-probs"):
        write_trajectories(tmp_path / "step_3.jsonl", [msgspec.structs.replace(good, turns=(short,))])


def test_a_damaged_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "step_3.jsonl"
    write_trajectories(path, [rollout(3, 0, (1.0, 0.5)), rollout(3, 1, (1.0, 0.5))])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunFailed, match=r"step_3\.jsonl:2: damaged: cut short"):
        list(read_trajectories(path))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(RunFailed, match=r"step_3\.jsonl:2: damaged"):
        list(read_trajectories(path))
