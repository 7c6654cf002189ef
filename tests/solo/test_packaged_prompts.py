"""Every packaged experiment of single-turn prompts runs as it ships, through the commands that a user types."""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poimen_exp import app
from poimen_exp.__main__ import main
from poimen_exp.cli import app as poimen
from poimen_exp.config.compose import compose_config
from poimen_exp.errors import Refused
from poimen_exp.tracking.inspect import inspect_run
from poimen_exp.tracking.metrics_log import read_metrics
from poimen_exp.tracking.trajectories import read_trajectories

from .prompt_support import EXPERIMENTS

_BRIEF = ("device=cpu", "tracking=none", "trainer.total_training_steps=2", "trainer.test_freq=2")
VERLS_NAMES = {
    *(f"critic/{name}/{of}" for name in ("score", "rewards", "advantages", "returns") for of in ("mean", "max", "min")),
    *(f"{name}/{of}" for name in ("response_length", "prompt_length") for of in ("mean", "max", "min", "clip_ratio")),
}
VERLS_CRITIC = {"critic/values/mean", "critic/vf_explained_var", "critic/vf_loss", "critic/vf_clipfrac", "critic/lr"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of two steps of each experiment."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name in EXPERIMENTS:
            lines = [
                f"+experiment={name}",
                *_BRIEF,
                f"hydra.run.dir={root / name}",
                "hydra.job_logging.root.level=ERROR",
            ]
            with (root / f"{name}.stderr").open("w") as told, redirect_stderr(told):
                assert main(lines) == 0
    return {name: root / name for name in EXPERIMENTS}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_runs_and_logs_verls_names_each_with_its_count(folders: dict[str, Path], name: str) -> None:
    folder = folders[name]
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["step"]) == ("completed", 2)
    first = next(line for line in read_metrics(folder / "metrics.jsonl").lines if line.step == 1)
    assert first.metrics.keys() >= VERLS_NAMES
    assert first.counts.keys() >= VERLS_NAMES
    assert (first.metrics.keys() >= VERLS_CRITIC) == (name == "ppo")
    assert ("actor/reward_kl_penalty" in first.metrics) == (name == "rloo")
    last = next(line for line in read_metrics(folder / "metrics.jsonl").lines if line.step == 2)
    assert last.counts["val/reward/total"] == 16
    assert inspect_run(folder)["ok"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_its_records_say_how_each_response_was_learnt_from(folders: dict[str, Path], name: str) -> None:
    records = list(read_trajectories(folders[name] / "trajectories/step_2.jsonl"))
    assert {record.update for record in records} == {"replay" if name == "ppo" else "fresh"}
    assert {record.policy_version for record in records} == {1}
    by_token = name in ("ppo", "reinforce_plus_plus")
    for record in records:
        (turn,) = record.turns
        assert len(turn.log_probs) == len(turn.response_ids)
        if turn.advantages is not None:
            assert by_token
            assert len(turn.advantages) == len(turn.response_ids)
    assert any(record.turns[0].advantages is not None for record in records) == by_token
    provenance = json.loads((folders[name] / "provenance.json").read_text())
    assert provenance["identity"]["reward"] == "target_length/1"
    assert provenance["identity"]["data"].startswith("train ")


def test_the_actor_waits_for_the_critic(folders: dict[str, Path]) -> None:
    """trainer.critic_warmup=2: step 1 trains the critic alone."""
    lines = {line.step: line.metrics for line in read_metrics(folders["ppo"] / "metrics.jsonl").lines}
    assert "actor/pg_loss" not in lines[1]
    assert "actor/pg_loss" in lines[2]
    assert "critic/vf_loss" in lines[1]
    notice = "trainer.critic_warmup=2: until step 2 only the critic learns"
    assert [name for name in EXPERIMENTS if notice in folders[name].with_suffix(".stderr").read_text()] == ["ppo"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["corpus.path=somewhere"], "corpus.path: got 'somewhere', expected it left out"),
        (["rewards.provider=null"], "rewards.provider: got none, expected exactly one source of rewards"),
        (
            [f"reward.custom_reward_function.path={Path(__file__).with_name('reward_by_text.py')}"],
            "reward.custom_reward_function.path, expected exactly one source of rewards among rewards.provider, "
            "reward.custom_reward_function.path, reward.reward_model.enable; set rewards.provider=null",
        ),
        (["trainer.n_gpus_per_node=2"], "got 2, expected 1 or 8 (verl's default, taken as not set): distributed_only"),
        (["reward.reward_model.enable=true"], "reward.reward_model.model_path: got None"),
        (["actor_rollout_ref.rollout.n=1"], "a group of one has no baseline"),
        (["data.train_files=none.parquet"], "data.train_files: got 'none.parquet', expected Parquet files that exist"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"], "expected fixed"),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"], "expected a whole number with seq-mean"),
        (["critic.enable=true"], "no critic but for gae"),
        (["trainer.resume_mode=resume_path"], "no checkpoint there"),
        (
            ["algorithm.gamma=0.5"],
            "algorithm.gamma: got 0.5, expected 1.0 (verl's default, taken as not set): informational_only",
        ),
        (["trainer.total_training_steps=null", "trainer.total_epochs=0"], "expected a whole number, 1 or more"),
    ],
    ids=lambda part: part[0].split("=")[0] if isinstance(part, list) else "",
)
def test_what_does_not_fit_together_is_refused_by_name(lines: list[str], message: str) -> None:
    with pytest.raises(Refused) as refused:
        app.check(compose_config(["+experiment=grpo", *lines]))
    assert message in str(refused.value)


@pytest.mark.parametrize("steps", ["20", "null"])
def test_a_batch_larger_than_its_files_is_named_with_their_rows_and_nothing_else_is_blamed(steps: str) -> None:
    lines = ["data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=128", "trainer.total_epochs=3"]
    with pytest.raises(Refused) as refused:
        app.check(compose_config(["+experiment=grpo", *lines, f"trainer.total_training_steps={steps}"]))
    first, *others = str(refused.value).splitlines()
    assert first.startswith("data.train_batch_size: got 128, expected at most 96: data.train_files has 96 rows (")
    assert others == []


def test_epochs_count_where_no_number_of_steps_is_given() -> None:
    """96 rows in batches of 8 are 12 steps an epoch; at most 40 of them are 5."""
    from poimen_exp.solo.plan import compile_settings

    lines = ["+experiment=grpo", "trainer.total_training_steps=null", "trainer.total_epochs=3"]
    assert compile_settings(compose_config(lines))[0].trainer.total_training_steps == 36
    fewer = compile_settings(compose_config([*lines, "data.train_max_samples=40"]))[0]
    assert (fewer.trainer.total_training_steps, fewer.optim.total_training_steps) == (15, 15)
    with pytest.raises(Refused, match=r"expected enough epochs for trainer\.total_training_steps=40: an epoch has 12"):
        compile_settings(compose_config([*lines[:1], "trainer.total_training_steps=40", "trainer.total_epochs=3"]))


def test_data_sample_writes_what_a_run_reads(tmp_path: Path) -> None:
    out = tmp_path / "a.parquet"
    said = CliRunner().invoke(
        poimen, ["data", "sample", "--reward-profile", "exact-answer", "--rows", "9", "--out", str(out)]
    )
    assert said.exit_code == 0
    assert "rewards.provider=exact_answer" in said.output
    lines = ["+experiment=grpo", f"data.train_files={out}", f"data.val_files={out}", "rewards.provider=exact_answer"]
    checked = app.check(compose_config([*lines, "device=cpu"]))
    assert checked.solo is not None
    assert checked.solo.setup.train_size == 9
