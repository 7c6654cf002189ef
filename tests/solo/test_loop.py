"""When a run stops, and what it says then: driven by a task that is told what to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from poimen_exp.config.compose import compose_config
from poimen_exp.errors import RunFailed
from poimen_exp.gates.metrics import Means
from poimen_exp.gates.types import Generation
from poimen_exp.solo.checkpoint import Progress
from poimen_exp.solo.engine import Follow, Request
from poimen_exp.solo.loop import Loop, collapse_alarm
from poimen_exp.solo.plan import compile_settings
from poimen_exp.solo.settings import SoloSettings, TrainerSettings
from poimen_exp.solo.task import Measured, Needs, RolloutBatch, Validation
from poimen_exp.solo.update import Updater
from poimen_exp.tracking.metrics_log import read_metrics
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.settings import TrackingSettings
from poimen_exp.tracking.tracker import Tracker

from .support import LOSS, OPTIM, PAD, TEMPERATURE, batch, policy, some_rows


def means(**values: list[float]) -> Means:
    out = Means()
    for name, listed in values.items():
        out.add(name.replace("__", "/"), listed)
    return out


@dataclass
class ToldTask:
    """Two prompts of three rows each; validations and advantages as told."""

    val: Sequence[float] = (0.0,)
    advantages: Sequence[float] = (1.0, -1.0, 0.5, -0.5, 0.2, -0.2)
    failed: int = 0
    watch: Means = field(default_factory=Means)
    train_size: int = 8
    validations: int = 0

    def rollout(self, prompts: Sequence[int], step: int) -> RolloutBatch:  # noqa: ARG002
        made = batch(some_rows(), self.advantages, [0, 0, 0, 1, 1, 1])
        metrics = means(reward__total=[1.0, 0.0])
        return replace(made, metrics=metrics, watch=self.watch, attempted=10, failed=self.failed)

    @property
    def needs(self) -> Needs:
        return Needs()

    def weigh(self, batch: RolloutBatch, measured: Measured) -> RolloutBatch:  # noqa: ARG002
        return batch

    def validate(self, step: int) -> Validation:  # noqa: ARG002
        value = self.val[min(self.validations, len(self.val) - 1)]
        self.validations += 1
        return Validation(means(reward__total=[value]), 1, 0, ())


@dataclass
class ToldEngine:
    """Notes when it is told to sleep and to take new weights; the task samples without it."""

    told: list[str] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], generator: torch.Generator) -> list[Generation]:
        raise NotImplementedError

    def serve(self, requests: Mapping[int, Request], follow: Follow, generator: torch.Generator) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        self.told.append("sync")

    def sleep(self) -> None:
        self.told.append("sleep")


MakeLoop = Callable[..., tuple[Loop, list[str]]]


@pytest.fixture
def loop(tiny_folder: Path) -> Iterator[MakeLoop]:
    """``loop(task, folder, **trainer settings)`` gives a loop and what it says; its records are closed at the end."""
    with ExitStack() as stack:

        def make(task: ToldTask, folder: Path, **trainer: object) -> tuple[Loop, list[str]]:
            tracker = Tracker(RunFolder.create(folder), TrackingSettings(wandb="disabled", trajectory_freq=0), {})
            stack.callback(tracker.folder.close)
            stack.callback(tracker.finish, "failed")
            return _loop(task, tiny_folder, tracker, **trainer)

        yield make


def _loop(task: ToldTask, tiny_folder: Path, tracker: Tracker, **trainer: object) -> tuple[Loop, list[str]]:
    settings: SoloSettings = compile_settings(compose_config(["+experiment=quickstart"]))[0]
    base = TrainerSettings(
        total_training_steps=20,
        test_freq=1,
        save_freq=0,
        val_before_train=True,
        max_ckpt_to_keep=2,
        patience=None,
        min_delta=0.0,
        on_collapse="warn",
        adapter_weights="best",
    )
    step = replace(settings.step, train_batch_size=2, ppo_mini_batch_size=2, ppo_epochs=1)
    settings = replace(settings, trainer=replace(base, **trainer), step=step)  # type: ignore[arg-type]
    made = policy(tiny_folder)
    updater = Updater(made, made.state(), PAD, TEMPERATURE, LOSS, OPTIM, step)
    said: list[str] = []
    state, engine = made.state(), ToldEngine()
    return Loop(settings, task, made, updater, engine, state, {}, tracker, said.append, Progress()), said


def test_a_run_converges_after_patience_validations_without_a_better_one(loop: MakeLoop, tmp_path: Path) -> None:
    # Validations at steps 0 to 5: the best is at step 2, three worse or equal ones follow.
    task = ToldTask(val=[0.1, 0.3, 0.5, 0.4, 0.5, 0.2, 0.9])
    made, said = loop(task, tmp_path / "r", patience=3)
    assert made.train() == "converged"
    assert (made.progress.step, made.progress.best_step, made.progress.best_value) == (5, 2, 0.5)
    assert "best 0.5000 at step 2" in said[-1]


def test_a_gain_below_min_delta_is_no_gain(loop: MakeLoop, tmp_path: Path) -> None:
    task = ToldTask(val=[0.1, 0.15, 0.19, 0.19])
    made, _ = loop(task, tmp_path / "r", patience=2, min_delta=0.1)
    assert made.train() == "converged"
    assert (made.progress.step, made.progress.best_step) == (2, 0)


def test_the_engine_sleeps_while_others_learn_and_takes_every_update(loop: MakeLoop, tmp_path: Path) -> None:
    made, _ = loop(ToldTask(), tmp_path / "r", total_training_steps=2, test_freq=2)
    made.train()
    assert isinstance(made.engine, ToldEngine)
    # The validation of the start; then two steps of rollout and update, the second validated.
    assert made.engine.told == ["sleep", "sleep", "sync", "sleep", "sync", "sleep"]


def test_a_run_without_patience_does_every_step(loop: MakeLoop, tmp_path: Path) -> None:
    made, _ = loop(ToldTask(), tmp_path / "r", total_training_steps=3)
    assert made.train() == "completed"
    assert made.progress.optimizer_steps == 3


def test_nan_advantages_end_the_run_at_the_third_skip_in_a_row_and_are_never_saved(
    loop: MakeLoop, tmp_path: Path
) -> None:
    task = ToldTask(advantages=[float("nan"), 0.0, 0.0, 0.0, 0.0, 0.0])
    made, said = loop(task, tmp_path / "r", save_freq=1)
    before = made.policy.state()
    with pytest.raises(RunFailed, match=r"step 3: 3 optimizer steps in a row and 3 of 20 in all were skipped.*row 0"):
        made.train()
    assert all(torch.equal(value, before[name]) for name, value in made.policy.state().items())
    assert len([line for line in said if "optimizer step skipped: advantage nan of row 0" in line]) == 3
    lines = read_metrics(tmp_path / "r" / "metrics.jsonl").lines
    assert [line.metrics.get("update/skipped") for line in lines] == [None, 1.0, 1.0, 1.0]


def test_failed_rollouts_above_the_share_end_the_run(loop: MakeLoop, tmp_path: Path) -> None:
    made, _ = loop(ToldTask(failed=2), tmp_path / "r")
    with pytest.raises(RunFailed, match=r"step 1: 2 of 10 rollouts failed, above rollout\.max_failed=0\.1"):
        made.train()


def test_failed_rollouts_within_the_share_are_counted(loop: MakeLoop, tmp_path: Path) -> None:
    made, _ = loop(ToldTask(failed=1), tmp_path / "r", total_training_steps=1)
    made.train()
    line = read_metrics(tmp_path / "r" / "metrics.jsonl").lines[-1]
    assert (line.metrics["train/rollout/failed"], line.counts["train/rollout/failed"]) == (1.0, 10)


def test_a_collapse_warns_or_stops_as_configured(loop: MakeLoop, tmp_path: Path) -> None:
    watch = means(updated=[1.0] * 20, ended=[0.0] * 5)
    made, said = loop(ToldTask(watch=watch), tmp_path / "warn", total_training_steps=1)
    assert made.train() == "completed"
    assert any("collapse alarm: 100% of 20 turns update and none of 5 readings exits" in line for line in said)
    made, _ = loop(ToldTask(watch=watch), tmp_path / "stop", on_collapse="stop")
    with pytest.raises(RunFailed, match=r"stopped by stop\.on_collapse"):
        made.train()


def test_the_collapse_alarm_has_its_two_rules_and_their_bounds() -> None:
    # 19 of 20 updates is above 90 %, 18 of 20 is not; one exit is enough to be silent.
    assert collapse_alarm(means(updated=[1.0] * 19 + [0.0], ended=[0.0, 0.0])) is not None
    assert collapse_alarm(means(updated=[1.0] * 18 + [0.0] * 2, ended=[0.0, 0.0])) is None
    assert collapse_alarm(means(updated=[1.0] * 20, ended=[0.0, 1.0])) is None
    assert collapse_alarm(means(exit_at_once=[1.0] * 19 + [0.0])) is not None
    assert collapse_alarm(means(exit_at_once=[1.0] * 18 + [0.0] * 2)) is None
    assert collapse_alarm(Means()) is None


def test_a_validation_without_any_finished_reading_is_a_failure(loop: MakeLoop, tmp_path: Path) -> None:
    class NoneFinished(ToldTask):
        def validate(self, step: int) -> Validation:  # noqa: ARG002
            return Validation(Means(), 3, 3, ())

    made, _ = loop(NoneFinished(), tmp_path / "r")
    with pytest.raises(RunFailed, match="validation at step 0: every rollout failed"):
        made.train()
