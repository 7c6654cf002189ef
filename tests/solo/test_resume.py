"""A run that was stopped and one that was not leave the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from poimen_exp import app
from poimen_exp.adapters.manifest import read_manifest
from poimen_exp.config.compose import compose_config
from poimen_exp.errors import Refused, RunFailed
from poimen_exp.solo.checkpoint import Progress
from poimen_exp.solo.run import extended
from poimen_exp.tracking.metrics_log import read_metrics
from poimen_exp.tracking.run_folder import RunFolder

from .run_support import SMALL, run, small_corpus, small_settings

_TIMES = ("timing_s/", "perf/")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus") / "c")


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without a stop. An epoch has three steps: the middle of the run is the end of one."""
    folder = tmp_path_factory.mktemp("runs") / "multirun" / "straight" / "0"
    run(small_settings(corpus, "trainer.total_training_steps=6"), folder)
    return folder


def lines(folder: Path) -> list[tuple[int, dict[str, float], dict[str, int]]]:
    return [
        (line.step, {k: v for k, v in line.metrics.items() if not k.startswith(_TIMES)}, dict(line.counts))
        for line in read_metrics(folder / "metrics.jsonl").lines
    ]


def assert_same_end(first: Path, second: Path) -> None:
    for name in ("adapter.safetensors", "reference.safetensors", "optimizer.pt", "rng.pt", "progress.json"):
        file = Path("checkpoints/global_step_6") / name
        assert (first / file).read_bytes() == (second / file).read_bytes(), name
    assert lines(first) == lines(second)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (first / "adapter" / name).read_bytes() == (second / "adapter" / name).read_bytes()
    for step in range(1, 7):
        file = f"trajectories/step_{step}.jsonl"
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_three_and_three_steps_equal_six_across_the_end_of_an_epoch(
    corpus: Path, straight: Path, tmp_path: Path
) -> None:
    settings = small_settings(corpus, "trainer.total_training_steps=3")
    run(settings, tmp_path / "parts")
    run(extended(settings, 6), tmp_path / "parts", resume=True)
    assert_same_end(straight, tmp_path / "parts")


def test_a_run_killed_while_saving_goes_on_from_the_newest_complete_checkpoint(
    corpus: Path, straight: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(straight, killed)
    (killed / "result.json").unlink(missing_ok=True)
    # What kill -9 leaves in the middle of step 6's save: no step 6, a folder aside, a step more in the log.
    shutil.rmtree(killed / "checkpoints" / "global_step_6")
    aside = killed / "checkpoints" / ".global_step_6.writing"
    aside.mkdir()
    (aside / "adapter.safetensors").write_bytes(b"half")
    with (killed / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "time_s"')
    run(small_settings(corpus, "trainer.total_training_steps=6"), killed, resume=True)
    assert_same_end(straight, killed)
    assert not aside.exists()
    assert list((killed / "recovery-tails").iterdir())


def test_a_run_killed_before_its_first_checkpoint_starts_again(corpus: Path, straight: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(straight, killed)
    shutil.rmtree(killed / "checkpoints")
    run(small_settings(corpus, "trainer.total_training_steps=6"), killed, resume=True)
    assert_same_end(straight, killed)


def test_a_damaged_checkpoint_file_is_named(corpus: Path, straight: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(straight, damaged)
    file = damaged / "checkpoints" / "global_step_6" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(RunFailed, match=r"optimizer\.pt: damaged"):
        run(small_settings(corpus, "trainer.total_training_steps=7"), damaged, resume=True)


def test_another_alpha_is_refused_on_resume(corpus: Path, straight: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(straight, other)
    with pytest.raises(Refused, match="another alpha"):
        run(small_settings(corpus, "trainer.total_training_steps=7", "alpha=0.5"), other, resume=True)


def resumable(straight: Path, folder: Path, corpus: Path) -> Path:
    """A copy of a run that was started by the command line."""
    shutil.copytree(straight, folder)
    seed = small_settings(corpus).corpus.split_seed
    cfg = compose_config([*SMALL, f"corpus.path={corpus}", f"corpus.split_seed={seed}", "tracking=none"])
    (folder / "resolved.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    return folder


def unchecked(_: object) -> None:
    raise AssertionError("the check was reached")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("actor_rollout_ref.actor.optim.lr=0.5", "another optimizer: .*lr 0.002.* then, lr 0.5"),
        ("actor_rollout_ref.actor.optim.weight_decay=0.3", "another optimizer"),
        ("data.train_batch_size=8", "another batch: batch: 4 prompts then, 8 prompts now"),
        ("alpha=0.5", "another alpha: alpha: 0.9 then, 0.5 now"),
        ("trainer.total_training_steps=5", "got 5, but step 6 is in the record of .*; expected 6 or more$"),
    ],
)
def test_a_resume_that_could_not_have_its_way_is_refused_and_leaves_the_run_as_it_was(
    corpus: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, named: str
) -> None:
    other = resumable(straight, tmp_path / "other", corpus)
    monkeypatch.setattr(app, "check", unchecked)  # model and corpus are not waited for
    (other / "result.json").write_text("{}")
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    with pytest.raises(Refused, match=named):
        app.resume(other, ["trainer.total_training_steps=7", override])
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("steps", [3, 4, 5, 6])
def test_a_run_is_ended_at_its_newest_checkpoint_or_behind_its_record_and_nowhere_between(
    corpus: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    killed = resumable(straight, tmp_path / "killed", corpus)
    monkeypatch.setattr(RunFolder, "checkpoint_steps", lambda _: (1, 4))  # as a longer save_freq leaves them
    monkeypatch.setattr(app, "check", unchecked)
    monkeypatch.setattr("poimen_exp.solo.run.require_same_run", lambda *_: None)
    taken = steps in (4, 6)
    refused = r"step 6 is in the record of .*; expected 6 or more, or 4, the newest checkpoint's, to end there$"
    with pytest.raises(AssertionError if taken else Refused, match="was reached" if taken else refused):
        app.resume(killed, [f"trainer.total_training_steps={steps}"])


def test_an_adapter_names_the_run_that_it_is_of(straight: Path) -> None:
    assert read_manifest(straight / "adapter").run_id == "straight/0"


def test_a_damaged_manifest_is_named(corpus: Path, straight: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(straight, damaged)
    (damaged / "checkpoints" / "global_step_6" / "manifest.json").write_text('{"schema"')
    with pytest.raises(RunFailed, match=r"global_step_6/manifest\.json: damaged"):
        run(small_settings(corpus, "trainer.total_training_steps=7"), damaged, resume=True)


def test_only_the_newest_and_the_best_checkpoints_are_kept(corpus: Path, straight: Path) -> None:
    steps = {int(path.name.rsplit("_", 1)[1]) for path in (straight / "checkpoints").iterdir()}
    best = json.loads((straight / "checkpoints/global_step_6/progress.json").read_text())["best_step"]
    assert steps == {5, 6, best}
    assert small_settings(corpus).trainer.max_ckpt_to_keep == 2


def test_the_adapter_is_the_best_validations_or_the_last_steps(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation is best at step 1 of two."""
    scored = Progress.validated
    monkeypatch.setattr(Progress, "validated", lambda self, _, delta: scored(self, -abs(self.step - 1), delta))
    for weights, step, resume in (("best", 1, False), ("last", 2, True)):  # the second time no step is left to train
        changes = ("trainer.total_training_steps=2", "trainer.test_freq=1", f"adapter.weights={weights}")
        run(small_settings(corpus, *changes), tmp_path, resume=resume)
        assert json.loads((tmp_path / "checkpoints/global_step_2/progress.json").read_text())["best_step"] == 1
        assert read_manifest(tmp_path / "adapter").step == step
        saved = load_file(tmp_path / f"checkpoints/global_step_{step}/adapter.safetensors")
        written = load_file(tmp_path / "adapter/adapter_model.safetensors")
        assert sorted(map(float_sum, saved.values())) == sorted(map(float_sum, written.values()))


def float_sum(tensor: torch.Tensor) -> float:
    return float(tensor.double().sum())


def test_a_batch_larger_than_the_training_split_is_refused(corpus: Path, tmp_path: Path) -> None:
    settings = small_settings(corpus, "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    with pytest.raises(Refused, match=r"train_batch_size=16: the training split has 14 tasks"):
        run(settings, tmp_path / "r")
