"""``poimen plan --dry-run``: everything a run reads is read, nothing is trained, and what is wrong is exit code 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from poimen_exp.tracking.run_folder import RunFolder

from .support import CORPUS, MODEL, poimen, verl_file

STEPS = "actor_rollout_ref.actor.ppo_mini_batch_size"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def test_a_sound_configuration_is_loaded_and_no_run_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert poimen(monkeypatch, "plan", str(verl_file(tmp_path)), "--dry-run") == 0
    said = capsys.readouterr().out
    assert "dry run: model, tokenizer, tasks, rewards and gate check are in order; no step was taken" in said
    assert "estimate: at most" in said
    assert list(Path.cwd().iterdir()) == []


def test_the_estimate_is_in_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert poimen(monkeypatch, "plan", str(verl_file(tmp_path)), "--json") == 0
    found = json.loads(capsys.readouterr().out)["estimate"]
    assert found["tokens_per_run"] > 3 * found["tokens_per_step"] > 0
    parts = found["memory"]
    assert parts["peak"] == parts["weights"] + parts["adapter"] + parts["cache"] + max(
        parts["sampling"], parts["update"]
    )


def test_a_missing_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = verl_file(tmp_path, {"actor_rollout_ref.model.path": str(tmp_path / "none")})
    assert poimen(monkeypatch, "plan", str(source), "--dry-run") == 2


def test_a_model_without_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(Path(MODEL) / "config.json", model)
    source = verl_file(tmp_path, {"actor_rollout_ref.model.path": str(model)})
    assert poimen(monkeypatch, "plan", str(source), "--dry-run") == 2
    assert "no tokenizer.json there" in capsys.readouterr().err
    assert poimen(monkeypatch, "plan", str(source)) == 0  # a plan looks at the configuration, and says so
    assert "estimate: not made: actor_rollout_ref.model.path=" in capsys.readouterr().out


def test_a_corpus_that_was_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = Path(shutil.copytree(CORPUS, tmp_path / "corpus"))
    rows = (corpus / "corpus.jsonl").read_bytes()
    (corpus / "corpus.jsonl").write_bytes(rows.replace(b"e", b"E", 1))
    source = verl_file(tmp_path, {"corpus.path": str(corpus)})
    assert poimen(monkeypatch, "plan", str(source), "--dry-run") == 2
    assert "corpus.jsonl" in capsys.readouterr().err


def test_a_batch_larger_than_the_training_split_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = verl_file(tmp_path, {"data.train_batch_size": 4096, STEPS: 4096})
    assert poimen(monkeypatch, "plan", str(source), "--dry-run") == 2
    assert "expected at least one full batch" in capsys.readouterr().err


def test_a_batch_that_is_no_multiple_of_the_mini_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert poimen(monkeypatch, "plan", str(verl_file(tmp_path, {STEPS: 3})), "--dry-run") == 2
    assert "expected a multiple of actor_rollout_ref.actor.ppo_mini_batch_size (3)" in capsys.readouterr().err


def test_corrupt_parquet_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.parquet"
    file.write_bytes(b"PAR1 no more")
    changes = {
        "algorithm.adv_estimator": "grpo",
        "corpus.path": None,
        "rewards.provider": "target_length",
        "data.train_files": str(file),
        "data.val_files": str(file),
    }
    assert poimen(monkeypatch, "plan", str(verl_file(tmp_path, changes)), "--dry-run") == 2
    assert "prompts.parquet" in capsys.readouterr().err


def test_nothing_to_plan_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert poimen(monkeypatch, "plan") == 2
    assert "expected a YAML file, or --example NAME" in capsys.readouterr().err
    assert poimen(monkeypatch, "plan", "--example", "papr") == 2
    said = capsys.readouterr().err
    assert "--example: got papr, expected one of" in said
    assert said.endswith("; did you mean --example paper?\n")


def test_the_local_configuration_of_a_plan_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "data.train_batch_size": 2,
        STEPS: 2,
        "actor_rollout_ref.rollout.n": 2,
        "trainer.total_training_steps": 1,
        "trainer.val_before_train": False,
        "corpus.max_val_tasks": 2,
        "tracking.wandb": "disabled",
        "device": "cpu",
    }
    local, run = tmp_path / "local.yaml", tmp_path / "run"
    assert poimen(monkeypatch, "plan", str(verl_file(tmp_path, changes)), "--out", str(local)) == 0
    assert poimen(monkeypatch, "run", str(local), "trainer.test_freq=1", "--folder", str(run)) == 0
    folder = RunFolder.open(run, "read")
    result = folder.read_result()
    assert result is not None
    assert (result.status, result.step) == ("completed", 1)
    plan = json.loads(folder.plan.read_text())
    assert plan["estimate"]["memory"]["peak"] > 0
    assert {entry["field"]: entry["value"] for entry in plan["fields"]}["trainer.nnodes"] == 1
    said = capsys.readouterr()
    assert "estimate: at most" in said.err
    assert said.err.index(f"run folder: {run}\n") < said.err.index("estimate: at most")
    assert said.out.endswith(f"run folder: {run}\n")
    assert poimen(monkeypatch, "run", str(local), "--folder", str(run)) == 2  # a run lies there
    capsys.readouterr()
    assert poimen(monkeypatch, "resume", str(run), "trainer.total_training_steps=3") == 0
    assert " in 2 of 3 steps; peak memory " in capsys.readouterr().err
