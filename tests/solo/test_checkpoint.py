"""A checkpoint is whole or does not count, also where a kill meets its deletion."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from poimen_exp.solo.checkpoint import (
    Progress,
    Trained,
    TrainState,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from poimen_exp.tracking.run_folder import RunFolder


class Killed(BaseException): ...


def save(folder: RunFolder, step: int) -> None:
    weights = {"weight": torch.ones(2)}
    save_checkpoint(folder, Progress(step=step), TrainState(Trained(weights, {}, {}), weights, {}), 0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with checkpoints of steps 1 and 2."""
    folder = RunFolder(tmp_path, None)
    folder.metrics.touch()
    save(folder, 1)
    save(folder, 2)
    return folder


@contextmanager
def deletion_killed(monkeypatch: pytest.MonkeyPatch, first: str) -> Iterator[None]:
    """The first deletion inside the block gets no further than one file."""

    def dies(path: Path, **_: Any) -> None:
        if path.exists():
            (path / first).unlink()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dies)
        with pytest.raises(Killed):
            yield


@pytest.mark.parametrize("first", ["manifest.json", "adapter.safetensors"])
def test_a_kill_while_an_old_checkpoint_is_deleted(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    with deletion_killed(monkeypatch, first):
        prune_checkpoints(folder, 1, None)
    assert (folder.checkpoint_steps(), folder.checkpoint_steps(complete=False)) == ((2,), ())
    prune_checkpoints(folder, None, None)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["global_step_2"]


@pytest.mark.parametrize("first", ["manifest.json", "adapter.safetensors"])
def test_a_kill_while_a_step_is_saved_again(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    with deletion_killed(monkeypatch, first):
        save(folder, 2)
    assert load_checkpoint(folder.checkpoint(2)).progress.step == 2
    save(folder, 2)
    prune_checkpoints(folder, None, None)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["global_step_1", "global_step_2"]
