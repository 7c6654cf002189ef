"""Dataset rows, checkpoints that are complete or not there, and adapters from sharded checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from poimen_exp.adapters.manifest import AdapterInfo
from poimen_exp.errors import Refused, RunFailed
from poimen_exp.solo.checkpoint import Progress
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.verl_backend import adapter
from poimen_exp.verl_backend.checkpoint import complete, newest
from poimen_exp.verl_backend.dataset import GateDataset
from poimen_exp.verl_backend.export import lora_tensors
from poimen_exp.verl_backend.settings import settings_of


def test_a_row_names_its_task_and_holds_none_of_its_text() -> None:
    rows = GateDataset(OmegaConf.create({"split": "val", "tasks": 3}))
    assert len(rows) == 3
    assert (rows[2]["split"], rows[2]["index"]) == ("val", 2)
    assert set(rows[2]) == {"raw_prompt", "split", "index", "data_source", "reward_model"}
    with pytest.raises(IndexError):
        rows[3]


def test_verls_max_samples_takes_the_first_tasks() -> None:
    assert len(GateDataset(OmegaConf.create({"split": "train", "tasks": 9}), max_samples=4)) == 4
    assert len(GateDataset(OmegaConf.create({"split": "train", "tasks": 9}), max_samples=-1)) == 9


IDENTITY = {"corpus": "c1", "base_model": "m1"}


def checkpoint(folder: RunFolder, step: int, *, finished: bool = True) -> Path:
    target = folder.checkpoint(step)
    (target / "actor").mkdir(parents=True)
    (target / "actor" / "model.pt").write_text(f"weights of {step}")
    if finished:
        (folder.path / "metrics.jsonl").write_bytes(b" " * (100 + step))
        complete(target, Progress(step=step, best_step=1, best_value=0.5), IDENTITY, metrics_bytes=100 + step)
    return target


def test_a_run_goes_on_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, None)
    checkpoint(folder, 2)
    checkpoint(folder, 4)
    checkpoint(folder, 6, finished=False)  # killed while verl saved
    point = newest(folder, IDENTITY)
    assert point is not None
    assert (point.path.name, point.metrics_bytes) == ("global_step_4", 104)
    assert point.progress == Progress(step=4, best_step=1, best_value=0.5)


def test_an_adapter_names_the_run_that_it_is_of(
    smoke: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = SimpleNamespace(corpus_id="logs", sha256="ab" * 32, label_status="constructed")
    exported: list[AdapterInfo] = []
    monkeypatch.setattr(adapter, "export_checkpoint", lambda _actor, _folder, info: exported.append(info))
    cfg, folder = smoke(), RunFolder(tmp_path / "multirun/verl_smoke/monday/0", None)
    adapter.write_adapter(cfg, settings_of(cfg), SimpleNamespace(corpus=corpus), Progress(step=2, best_step=2), folder)
    assert [(info.run_id, info.step) for info in exported] == [("verl_smoke/monday/0", 2)]


def test_the_last_step_is_exported_where_the_configuration_says_so(
    smoke: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = SimpleNamespace(corpus_id="logs", sha256="ab" * 32, label_status="constructed")
    exported: list[tuple[str, int]] = []
    monkeypatch.setattr(adapter, "export_checkpoint", lambda actor, _, info: exported.append((str(actor), info.step)))
    cfg, folder = smoke("adapter.weights=last"), RunFolder(tmp_path, None)
    adapter.write_adapter(cfg, settings_of(cfg), SimpleNamespace(corpus=corpus), Progress(step=9, best_step=4), folder)
    assert exported == [(str(folder.checkpoint(9) / "actor"), 9)]


def test_without_a_complete_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, None)
    checkpoint(folder, 2, finished=False)
    assert newest(folder, IDENTITY) is None


def test_a_damaged_checkpoint_is_named_by_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, None)
    (checkpoint(folder, 2) / "actor" / "model.pt").write_text("other")
    with pytest.raises(RunFailed, match=r"model\.pt: damaged or missing; expected sha256"):
        newest(folder, IDENTITY)


def test_a_checkpoint_of_another_corpus_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, None)
    checkpoint(folder, 2)
    with pytest.raises(Refused, match=r"was trained with corpus 'c1', this run has 'c2'"):
        newest(folder, {**IDENTITY, "corpus": "c2"})


def test_the_adapter_is_that_of_the_best_validation_unless_that_is_the_untouched_start() -> None:
    assert Progress(step=9, best_step=4).adapter_step(began_fresh=True, weights="best") == 4
    assert Progress(step=9, best_step=0).adapter_step(began_fresh=True, weights="best") == 9  # lora_B is zero at step 0
    assert (
        Progress(step=9, best_step=0).adapter_step(began_fresh=False, weights="best") == 0
    )  # the adapter it started from
    assert Progress(step=9).adapter_step(began_fresh=True, weights="best") == 9  # nothing was validated
    assert Progress(step=9, best_step=4).adapter_step(began_fresh=True, weights="last") == 9
    assert Progress(step=9, best_step=0).adapter_step(began_fresh=False, weights="last") == 9


def actor_folder(tmp_path: Path, world: int) -> Path:
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    return tmp_path


def test_plain_tensors_are_taken_once_and_keep_their_precision(tmp_path: Path) -> None:
    actor = actor_folder(tmp_path, 1)
    value = torch.tensor([[1.0 + 2**-20, 0.5]])  # bfloat16 would lose the 2**-20
    torch.save({"q.lora_A.default.weight": value, "q.weight": torch.ones(9)}, actor / "model_world_size_1_rank_0.pt")
    tensors = lora_tensors(actor)
    assert list(tensors) == ["q.lora_A.default.weight"]
    assert torch.equal(tensors["q.lora_A.default.weight"], value)


def test_a_missing_shard_ends_the_export(tmp_path: Path) -> None:
    actor = actor_folder(tmp_path, 2)
    torch.save({}, actor / "model_world_size_2_rank_0.pt")
    with pytest.raises(RunFailed, match=r"model_world_size_2_rank_1\.pt: missing; expected a shard of each of the 2"):
        lora_tensors(actor)
