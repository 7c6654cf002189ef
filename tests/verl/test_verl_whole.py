"""verl's V1 trainer whole, without a GPU: Ray, TransferQueue, the FSDP2 engine over gloo, a transformers rollout.

Three steps with LoRA, validation, checkpoints, adapter, by the command line: one run that all tests here look at. Then
its copy, whose sampling server dies: it ends with exit 1, names the server, and goes on later from its checkpoint.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from verl_runs import Ended, lines_of

from poimen_exp.__main__ import main
from poimen_exp.adapters.manifest import read_manifest
from poimen_exp.config.paths import asset
from poimen_exp.gates.scoring import ANSWER_STEP, TurnBaseline, row_advantages
from poimen_exp.gates.scoring import GateRows as Rows
from poimen_exp.tracking.result import read_result
from poimen_exp.tracking.trajectories import RolloutRecord, read_trajectories
from poimen_exp.verl_backend.export import lora_tensors

pytestmark = [pytest.mark.verl, pytest.mark.slow]

ALPHA = 0.9
BASELINE: TurnBaseline = "group_step"
END_S = 120
"""Promised in docs/scale.md. Most of it is for a machine that has other work."""


def test_every_step_is_in_the_record_with_denominators(trained: Ended) -> None:
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


def test_a_rollout_batch_makes_two_optimizer_steps_however_many_turns_were_played(trained: Ended) -> None:
    # train_batch_size 4 / ppo_mini_batch_size 2, one epoch; 16 trajectories of 2 to 4 rows each are 32 rows and more.
    for step in (1, 2, 3):
        assert trained.lines[step].counts["update/skipped"] == 2
        assert trained.lines[step].metrics["update/skipped"] == 0.0
    rows = sum(len(record.turns) for record in read_trajectories(trained.folder.trajectory_file(1)))
    assert rows >= 32
    progress = json.loads((trained.folder.checkpoint(3) / "progress.json").read_text())
    assert progress["optimizer_steps"] == 6


def test_advantages_that_reached_the_loss_are_the_two_baselines(trained: Ended) -> None:
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


def test_the_sampler_has_the_trainers_adapter_after_every_sync(trained: Ended) -> None:
    assert "LoRA sync check: the sampler has 1.00 of a known adapter" in trained.output
    for step in (2, 3):  # at step 1 a fresh adapter changes nothing
        metrics = trained.lines[step].metrics
        assert metrics["training/sync/adapter_share"] == pytest.approx(1.0, abs=0.02)
        assert metrics["training/sync/sampler_trainer_diff"] < 1e-4  # float32 on both sides
        assert metrics["training/sync/trainer_base_diff"] > 1e-3


def test_checkpoints_are_complete_and_the_adapter_is_that_of_one_of_them(trained: Ended) -> None:
    from safetensors.torch import load_file

    result = read_result(trained.folder.result)
    assert result is not None
    assert (result.status, result.step) == ("completed", 3)
    assert result.best_step in trained.folder.checkpoint_steps()
    assert 3 in trained.folder.checkpoint_steps()
    step = read_manifest(trained.folder.adapter).step
    assert step == (result.best_step or 3)  # step 0 is the base model: then it is the last step's
    exported = load_file(trained.folder.adapter / "adapter_model.safetensors")
    saved = lora_tensors(trained.folder.checkpoint(step) / "actor")
    assert len(exported) == len(saved) > 0
    by_name = {name.replace(".default.weight", ".weight"): value for name, value in saved.items()}
    for name, value in exported.items():
        assert torch.equal(value, by_name[name]), name


def test_the_adapter_passes_the_checks_that_every_backends_adapter_passes(trained: Ended) -> None:
    from poimen_exp.adapters.check import mount_check
    from poimen_exp.adapters.probe import probe

    base = Path(asset("quickstart/model"))
    mount_check(trained.folder.adapter, base)
    assert probe(trained.folder.adapter, base).effect > 1e-3


def test_the_gate_check_of_a_run_on_verl_takes_its_optimizer_step_with_the_runs_own_loss(trained: Ended) -> None:
    report = json.loads((trained.folder.path / "gate_check.json").read_text())
    names = [check["name"] for check in report["checks"]]
    assert any("the run's loss" in name for name in names)  # use_kl_loss makes it another than verl's default


ONLY_ON_VERL = (
    "actor/kl_coef",
    "actor/perf/",
    "global_seqlen/",
    "perf/mfu/",
    "perf/time_per_step",
    "prompt_length/",
    "rollout_corr/",
    "timing_s/adv",
    "timing_s/old_log_prob",
    "timing_s/ref",
    "training/",
)
"""What verl logs beside (docs/scale.md): placement, phases that solo has inside its update, off-policy statistics."""


def test_metric_names_are_those_of_a_solo_run(trained: Ended, tmp_path: Path) -> None:
    same = (
        "corpus.max_val_tasks=8",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "tracking.wandb=disabled",
    )
    with warnings.catch_warnings():  # of the libraries: a command prints them
        warnings.simplefilter("ignore")
        assert main(["+experiment=quickstart", *same, f"hydra.run.dir={tmp_path / 'solo'}"]) == 0
    solo = lines_of(tmp_path / "solo")
    for step in (0, 1, 2):  # with a validation only, without one, with both
        mine, theirs = set(solo[step].metrics), set(trained.lines[step].metrics)
        assert mine - theirs == set()
        assert {name for name in theirs - mine if not name.startswith(ONLY_ON_VERL)} == set()
        assert set(solo[step].counts) <= set(trained.lines[step].counts)


def test_tokens_are_counted_without_padding_rows(trained: Ended) -> None:
    records = list(read_trajectories(trained.folder.trajectory_file(1)))
    turns = [turn for record in records for turn in record.turns]
    tokens = sum(turn.prompt_tokens + len(turn.response_ids) for turn in turns)
    assert trained.lines[1].metrics["perf/total_num_tokens"] == tokens


def test_recorded_rows_and_the_cores_function_agree(trained: Ended) -> None:
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


def test_a_resumed_run_goes_on_where_it_stopped(trained: Ended, killed: Ended) -> None:
    assert f"going on from {killed.folder.checkpoint(3)}" in killed.output
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
