"""Runs of every estimator that were stopped and that were not leave the same bytes, of actor and critic."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from poimen_exp.errors import Refused
from poimen_exp.solo.run import extended
from poimen_exp.tracking.metrics_log import read_metrics

from .prompt_support import EXPERIMENTS, run, small_settings

_TIMES = ("timing_s/", "perf/")
_FILES = ("adapter.safetensors", "reference.safetensors", "optimizer.pt", "rng.pt", "progress.json")
_CRITIC_FILES = ("critic.safetensors", "critic_optimizer.pt")


def lines(folder: Path, first: int = 0) -> list[tuple[int, dict[str, float], dict[str, int]]]:
    return [
        (line.step, {k: v for k, v in line.metrics.items() if not k.startswith(_TIMES)}, dict(line.counts))
        for line in read_metrics(folder / "metrics.jsonl").lines
        if line.step >= first
    ]


def assert_same_end(first: Path, second: Path, files: tuple[str, ...]) -> None:
    for name in files:
        file = Path("checkpoints/global_step_4") / name
        assert (first / file).read_bytes() == (second / file).read_bytes(), name
    for step in (3, 4):
        file = Path(f"trajectories/step_{step}.jsonl")
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def moved(folder: Path, name: str) -> bool:
    """Whether training changed a file of the checkpoints: without that, equal bytes would say nothing."""
    steps = [path for path in (folder / "checkpoints").iterdir() if path.name != "global_step_4"]
    last = (folder / "checkpoints/global_step_4" / name).read_bytes()
    return all((path / name).read_bytes() != last for path in steps)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_two_and_two_steps_equal_four(experiment: str, tmp_path: Path) -> None:
    settings = small_settings(experiment)
    files = (*_FILES, *_CRITIC_FILES) if experiment == "ppo" else _FILES
    run(settings, tmp_path / "straight")
    run(extended(settings, 2), tmp_path / "parts")
    run(settings, tmp_path / "parts", resume=True)
    assert_same_end(tmp_path / "straight", tmp_path / "parts", files)
    assert lines(tmp_path / "straight") == lines(tmp_path / "parts")
    assert moved(tmp_path / "parts", "adapter.safetensors")
    assert (tmp_path / "parts/checkpoints/global_step_4/critic.safetensors").exists() == (experiment == "ppo")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two"
    run(small_settings("ppo", "trainer.total_training_steps=2"), folder)
    return folder


def test_a_new_run_begins_with_the_checkpoint_of_another_and_ends_where_that_one_would_have(
    two_steps: Path, tmp_path: Path
) -> None:
    other = two_steps / "checkpoints" / "global_step_2"
    lines_of = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={other}"]
    run(small_settings("ppo", *lines_of), tmp_path / "new")
    run(small_settings("ppo"), two_steps.with_name("four"))
    files = tuple(name for name in (*_FILES, *_CRITIC_FILES) if name != "progress.json")
    assert_same_end(two_steps.with_name("four"), tmp_path / "new", files)
    assert [step for step, _, _ in lines(tmp_path / "new")] == [2, 3, 4]  # validated where it began


def test_another_estimator_reward_or_file_is_refused_on_resume(two_steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(two_steps, folder)
    with pytest.raises(Refused, match="another algorithm"):
        run(small_settings("ppo", "algorithm.lam=0.5"), folder, resume=True)


def test_checkpoints_come_at_save_freq_and_at_the_end_and_the_newest_are_kept(tmp_path: Path) -> None:
    lines_of = ["trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=1", "trainer.test_freq=-1"]
    run(small_settings("grpo", *lines_of, "trainer.val_before_train=false"), tmp_path / "r")
    assert [path.name for path in (tmp_path / "r/checkpoints").iterdir()] == ["global_step_4"]
    run(small_settings("grpo", *lines_of[:1], "trainer.test_freq=-1", "trainer.max_actor_ckpt_to_keep=null",
                       "trainer.val_before_train=false"), tmp_path / "all")  # fmt: skip
    kept = sorted(path.name for path in (tmp_path / "all/checkpoints").iterdir())
    assert kept == ["global_step_0", "global_step_2", "global_step_4"]
