"""The part of ``poimen export-verl`` that is of prompts: verl's own configuration, Parquet files, reward function."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf

from poimen_exp.config.schema import own_keys
from poimen_exp.config.tree import resolved
from poimen_exp.errors import Refused
from poimen_exp.solo.settings import SoloSettings

Side = Literal["train", "val"]
_FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}

_EXACT_ANSWER = '''"""exact_answer of poimen_exp with verl's signature: 1 for an accepted answer, else 0."""

from poimen_exp.solo.rewards import RewardInput, exact_answer

_PROVIDER = exact_answer()


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    told = RewardInput("", (), solution_str, 0, data_source, ground_truth, extra_info or {})
    return _PROVIDER.score([told])[0].total
'''


def prompts_config(cfg: DictConfig, settings: SoloSettings) -> tuple[DictConfig, dict[str, str]]:
    """verl's tree without our keys, and what means another thing there than in the run.

    Raises:
        Refused: a reward that verl's reward functions cannot compute, a reference adapter.
    """
    if settings.reward.provider == "target_length":
        raise Refused(
            "rewards.provider: got target_length, expected exact_answer, verl, a custom function or a classifier: "
            "verl tells a reward function the text, not the number of sampled tokens"
        )
    if settings.reference is not None:
        raise Refused(
            f"reference.adapter: got {settings.reference}, expected null: verl's reference is the frozen base"
        )
    out = OmegaConf.create(resolved(cfg))
    for name in {path.split(".")[0] for path in own_keys()}:
        out.pop(name, None)
    changes: dict[str, Any] = {
        "actor_rollout_ref.model.lora_adapter_path": "adapter",
        "data.train_files": copies(settings, "train"),
        "data.val_files": copies(settings, "val"),
        "trainer.resume_mode": "disable",
        "trainer.resume_from_path": None,
        "trainer.total_training_steps": settings.trainer.total_training_steps,
    }
    if settings.reward.custom_path is not None or settings.reward.provider == "exact_answer":
        changes["reward.custom_reward_function.path"] = "reward.py"
    changes |= float32_engines(cfg)
    for path, value in changes.items():
        OmegaConf.update(out, path, value, force_add=True)
    return out, {
        "start": "verl begins with adapter/; optimizer state, random state and counters of the run are not translated",
    }


def float32_engines(cfg: DictConfig) -> dict[str, Any]:
    """verl's engines compute in bfloat16 unless told otherwise: what tells those that computed in float32 here."""
    engines = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
    chosen = [engine for engine in engines if OmegaConf.select(cfg, engine).dtype in ("float32", "fp32")]
    return {f"{engine}.mixed_precision": dict(_FLOAT32) for engine in chosen}


def copies(settings: SoloSettings, side: Side) -> list[str]:
    """Where the Parquet files of a side lie in the export, in their order."""
    return [f"data/{side}-{place}.parquet" for place in range(len(_files(settings, side)))]


def _files(settings: SoloSettings, side: Side) -> tuple[Path, ...]:
    assert settings.prompts is not None
    return settings.prompts.train_files if side == "train" else settings.prompts.val_files


def prompts_data(settings: SoloSettings, out: Path) -> None:
    """Copies of the Parquet files (verl chooses and orders their rows as the run did), and the reward function."""
    (out / "data").mkdir()
    for side in get_args(Side):
        for source, name in zip(_files(settings, side), copies(settings, side), strict=True):
            shutil.copy(source, out / name)
    if settings.reward.custom_path is not None:
        shutil.copy(settings.reward.custom_path, out / "reward.py")
    elif settings.reward.provider == "exact_answer":
        (out / "reward.py").write_text(_EXACT_ANSWER)
