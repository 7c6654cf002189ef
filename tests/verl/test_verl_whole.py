"""verl's V1 trainer whole, without a GPU: Ray, TransferQueue, the FSDP2 engine over gloo, a transformers rollout.

Three steps with LoRA, validation, checkpoints, adapter; then the run goes on to a fourth step. The runs are made once,
by the command line, and looked at by the tests below.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from poimen_exp.gates.scoring import ANSWER_STEP, TurnBaseline, row_advantages
from poimen_exp.gates.scoring import GateRows as Rows
from poimen_exp.tracking.metrics_log import MetricLine, by_step, read_metrics
from poimen_exp.tracking.result import read_result
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.trajectories import RolloutRecord, read_trajectories

pytestmark = [pytest.mark.verl, pytest.mark.slow]

ALPHA = 0.9
BASELINE: TurnBaseline = "group_step"


@dataclass(frozen=True)
class Ran:
    """A finished command: the run folder as it left it, and what it said."""

    folder: RunFolder
    output: str
    lines: dict[int, MetricLine]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    return subprocess.run(arguments, capture_output=True, text=True, timeout=900, env=environment, check=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    if "verl" not in os.environ.get("POIMEN_REQUIRE", "").split(","):
        pytest.skip("verl: starts Ray for minutes; POIMEN_REQUIRE=verl runs it")
    path = tmp_path_factory.mktemp("verl") / "run"
    done = command(
        sys.executable, "-m", "poimen_exp", "+experiment=verl_smoke", "tracking.wandb=disabled", f"hydra.run.dir={path}"
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return Ran(RunFolder(path, None), done.stdout + done.stderr, by_step(read_metrics(path / "metrics.jsonl").lines))


@pytest.fixture(scope="module")
def resumed(trained: Ran) -> Ran:
    path = trained.folder.path
    script = "import sys, pathlib; from poimen_exp import app; app.resume(pathlib.Path(sys.argv[1]), sys.argv[2:])"
    done = command(sys.executable, "-c", script, str(path), "trainer.total_training_steps=4")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return Ran(trained.folder, done.stdout + done.stderr, by_step(read_metrics(path / "metrics.jsonl").lines))


def test_every_step_is_in_the_record_with_denominators(trained: Ran) -> None:
    assert list(trained.lines) == [0, 1, 2, 3]
    last = trained.lines[3]
    # 4 prompts x 4 rollouts; 8 validation tasks, read once each.
    assert last.counts["train/reward/total"] == 16
    assert last.counts["val/reward/total"] == 8
    assert last.metrics["train/rollout/failed"] == 0.0
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "timing_s/gen", "timing_s/update_actor"):
        assert math.isfinite(last.metrics[name]), name
    assert "val/reward/total" in trained.lines[0].metrics
    assert "val/reward/total" not in trained.lines[1].metrics  # test_freq 2


def test_a_rollout_batch_makes_two_optimizer_steps_however_many_turns_were_played(trained: Ran) -> None:
    # train_batch_size 4 / ppo_mini_batch_size 2, one epoch; 16 trajectories of 2 to 4 rows each are 32 rows and more.
    for step in (1, 2, 3):
        assert trained.lines[step].counts["update/skipped"] == 2
        assert trained.lines[step].metrics["update/skipped"] == 0.0
    rows = sum(len(record.turns) for record in read_trajectories(trained.folder.trajectory_file(1)))
    assert rows >= 32
    progress = json.loads((trained.folder.checkpoint(3) / "progress.json").read_text())
    assert progress["optimizer_steps"] == 6


def test_advantages_that_reached_the_loss_are_the_two_baselines(trained: Ran) -> None:
    records = list(read_trajectories(trained.folder.trajectory_file(2)))
    assert len(records) == 16
    expected = advantages_by_hand(records)
    found = [turn.advantage for record in records for turn in record.turns]
    assert found == pytest.approx(expected, abs=1e-6)
    assert len({round(value, 6) for value in expected}) > 2  # the batch has a signal


def advantages_by_hand(records: list[RolloutRecord]) -> list[float]:
    """From the recorded rewards, with sums and means over lists: no tensor code of the program."""
    out = []
    for record in records:
        group = [other for other in records if other.group == record.group]
        mean = sum(other.rewards["total"] for other in group) / len(group)
        for turn in record.turns:
            value = ALPHA * (record.rewards["total"] - mean)
            if turn.update_reward is not None:
                same = [t.update_reward for other in group for t in other.turns if t.chunk == turn.chunk]
                cell = [reward for reward in same if reward is not None]
                value += (1 - ALPHA) * (turn.update_reward - sum(cell) / len(cell))
            out.append(value)
    return out


def test_the_sampler_has_the_trainers_adapter_after_every_sync(trained: Ran) -> None:
    assert "LoRA sync check: the sampler has 1.00 of a known adapter" in trained.output
    for step in (2, 3):  # at step 1 a fresh adapter changes nothing
        metrics = trained.lines[step].metrics
        assert metrics["training/sync/adapter_share"] == pytest.approx(1.0, abs=0.02)
        assert metrics["training/sync/sampler_trainer_diff"] < 1e-4  # float32 on both sides
        assert metrics["training/sync/trainer_base_diff"] > 1e-3


def test_checkpoints_are_complete_and_the_adapter_is_that_of_the_best_validation(trained: Ran) -> None:
    from safetensors.torch import load_file

    from poimen_exp.verl_backend.export import lora_tensors

    result = read_result(trained.folder.result)
    assert result is not None
    assert (result.status, result.step) == ("completed", 3)
    assert result.best_step in trained.folder.checkpoint_steps()
    assert 3 in trained.folder.checkpoint_steps()
    exported = load_file(trained.folder.adapter / "adapter_model.safetensors")
    saved = lora_tensors(trained.folder.checkpoint(result.best_step) / "actor")
    assert len(exported) == len(saved) > 0
    by_name = {name.replace(".default.weight", ".weight"): value for name, value in saved.items()}
    for name, value in exported.items():
        assert torch.equal(value, by_name[name]), name


def test_the_adapter_passes_the_checks_that_every_backends_adapter_passes(trained: Ran) -> None:
    from poimen_exp.adapters.check import mount_check
    from poimen_exp.config.paths import asset

    mount_check(trained.folder.adapter, Path(asset("quickstart/model")))


def test_a_resumed_run_goes_on_where_it_stopped(trained: Ran, resumed: Ran) -> None:
    assert list(resumed.lines) == [0, 1, 2, 3, 4]
    for step in range(4):
        assert resumed.lines[step] == trained.lines[step]
    progress = json.loads((resumed.folder.checkpoint(4) / "progress.json").read_text())
    assert progress["optimizer_steps"] == 8
    assert resumed.lines[4].metrics["training/sync/trainer_base_diff"] > 1e-3  # the adapter came back
    result = read_result(resumed.folder.result)
    assert result is not None
    assert result.step == 4


def test_recorded_rows_and_the_cores_function_agree(trained: Ran) -> None:
    records = list(read_trajectories(trained.folder.trajectory_file(1)))
    flat = [(place, record, turn) for place, record in enumerate(records) for turn in record.turns]
    rows = Rows(
        trajectory=torch.tensor([place for place, _, _ in flat]),
        group=torch.tensor([record.group for _, record, _ in flat]),
        step=torch.tensor([ANSWER_STEP if turn.chunk is None else turn.chunk for _, _, turn in flat]),
        valid=torch.tensor([turn.update_reward is not None for _, _, turn in flat]),
        update_reward=torch.tensor([turn.update_reward or 0.0 for _, _, turn in flat]),
    )
    totals = torch.tensor([record.rewards["total"] for record in records])
    groups = torch.tensor([record.group for record in records])
    mixed = row_advantages(totals, groups, rows, ALPHA, BASELINE).mixed
    assert [turn.advantage for _, _, turn in flat] == mixed.tolist()
