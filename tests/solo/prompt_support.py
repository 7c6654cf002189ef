"""Small real runs of single-turn prompts: a few rows, the shipped model, short responses."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from poimen_exp.config.compose import compose_config
from poimen_exp.solo.parquet import write_rows
from poimen_exp.solo.plan import compile_settings
from poimen_exp.solo.prompt_setup import PromptSetup, prompt_setup
from poimen_exp.solo.rewards import RewardProvider
from poimen_exp.solo.run import run_solo
from poimen_exp.solo.sample_data import sample_rows
from poimen_exp.solo.settings import SoloSettings
from poimen_exp.tracking.result import RunResult
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.settings import TrackingSettings
from poimen_exp.tracking.tracker import Tracker

EXPERIMENTS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "ppo")
SMALL = (
    "device=cpu",
    "data.train_batch_size=4",
    "data.max_response_length=6",
    "trainer.test_freq=2",
    "trainer.save_freq=1",
    "trainer.total_training_steps=4",
    "stop=never",
    "rewards.provider=null",
    f"reward.custom_reward_function.path={Path(__file__).with_name('reward_by_text.py')}",
)


@lru_cache
def small_settings(experiment: str, *overrides: str) -> SoloSettings:
    """Settings of a packaged experiment with four prompts a step and six tokens a response."""
    mini = 2 if experiment == "ppo" else 4
    lines = [*SMALL, f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}"]
    if experiment == "ppo":
        lines.append("trainer.critic_warmup=2")
    return compile_settings(compose_config([f"+experiment={experiment}", *lines, *overrides]))[0]


def write_prompts(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """A Parquet file; ten rows for ``target_length`` where none are given."""
    write_rows(path, sample_rows("target-length", 10, 0) if rows is None else rows)
    return path


def run(
    settings: SoloSettings, folder: Path, *, resume: bool = False, reward: RewardProvider | None = None
) -> RunResult:
    """A run of ``settings`` in ``folder``, without W&B."""
    setup: PromptSetup = prompt_setup(settings, reward)
    opened = RunFolder.open(folder, "resume") if resume else RunFolder.create(folder)
    with opened, Tracker(opened, TrackingSettings(wandb="disabled"), {}) as tracker:
        return run_solo(settings, setup, tracker, lambda _: None, resume)
