"""The composed configurations between them which every leaf that feeds a setting is active."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from poimen_exp.config.compose import compose_config
from poimen_exp.solo.parquet import write_rows

from .support import MODEL

SMALL = (
    "device=cpu",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=1",
    "trainer.test_freq=1",
    "stop=never",
)

GATES = ("+experiment=quickstart", *SMALL, "corpus.max_val_tasks=2", "actor_rollout_ref.actor.use_kl_loss=true")


def prompt_rows(count: int) -> list[dict[str, Any]]:
    """Prompts with all that the reward providers want."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{place} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": f"{place + 1}"},
            "extra_info": {"index": place, "target_length": 4},
        }
        for place in range(count)
    ]


@lru_cache
def prompt_overrides(folder: Path) -> tuple[str, ...]:
    """grpo on eight prompts with the user's own reward."""
    write_rows(folder / "train.parquet", prompt_rows(8))
    write_rows(folder / "val.parquet", prompt_rows(2))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str))\n\n\nother = compute_score\n"
    )
    return (
        "+experiment=quickstart",
        "corpus.path='???'",
        *SMALL,
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        "data.max_response_length=8",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
    )


def gae_overrides(folder: Path) -> tuple[str, ...]:
    """gae with a critic under LoRA and KL in the reward."""
    return (
        *prompt_overrides(folder),
        "algorithm.adv_estimator=gae",
        "reward.custom_reward_function.path=null",
        "rewards.provider=exact_answer",
        "algorithm.use_kl_in_reward=true",
        "critic.enable=null",
        "trainer.max_critic_ckpt_to_keep=2",
        f"critic.model.path={MODEL}",
        "critic.model.lora_rank=4",
        "critic.fsdp.dtype=float32",
        "critic.ppo_mini_batch_size=2",
    )


def classifier_overrides(folder: Path) -> tuple[str, ...]:
    """grpo scored by a classifier."""
    return (
        *prompt_overrides(folder),
        "reward.custom_reward_function.path=null",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={MODEL}",
        "reward.reward_model.rollout.name=vllm",
    )


@lru_cache
def base(kind: str, folder: Path, more: tuple[str, ...] = ()) -> DictConfig:
    """The configuration called ``gates``, ``prompts``, ``gae`` or ``classifier``. Copy it before changing it."""
    kinds = {"prompts": prompt_overrides, "gae": gae_overrides, "classifier": classifier_overrides}
    lines = GATES if kind == "gates" else kinds[kind](folder)
    return compose_config([*lines, *more])
