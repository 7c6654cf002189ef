"""No key is accepted without effect: every leaf called exact or conformant changes a setting, or has one value."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from poimen_exp.config.compose import override
from poimen_exp.config.tree import verl_tree
from poimen_exp.errors import Refused
from poimen_exp.solo.plan import compile_settings, plan_fields, rule_of
from poimen_exp.solo.settings import SoloSettings

from .bases import base, prompt_rows, write_rows
from .support import MODEL

_ACTOR, _ROLLOUT, _MODEL, _REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model", "ref"))
_OPTIM = {
    "lr": ("0.5", 0.5),
    "weight_decay": ("0.5", 0.5),
    "betas": ("[0.8,0.9]", (0.8, 0.9)),
    "clip_grad": ("2.0", 2.0),
    "lr_warmup_steps": ("7", 7),
    "lr_scheduler_type": ("cosine", "cosine"),
    "min_lr_ratio": ("0.1", 0.1),
}


@dataclass(frozen=True)
class Change:
    """A base configuration, other values for some of its leaves with what their settings must become.

    ``with_them``: lines that these values need.
    """

    kind: str
    leaves: dict[str, tuple[str, Any]]
    with_them: tuple[str, ...] = field(default=())


CHANGES = {
    "gates": Change(
        "gates",
        {
            f"{_ACTOR}.clip_ratio": ("0.3", 0.3),
            f"{_ACTOR}.clip_ratio_low": ("0.3", 0.3),
            f"{_ACTOR}.clip_ratio_high": ("0.3", 0.3),
            f"{_ACTOR}.clip_ratio_c": ("4.0", 4.0),
            f"{_ACTOR}.loss_agg_mode": ("seq-mean-token-sum-norm", "seq-mean-token-sum-norm"),
            f"{_ACTOR}.loss_scale_factor": ("5", 5),
            f"{_ACTOR}.entropy_coeff": ("0.01", 0.01),
            f"{_ACTOR}.use_kl_loss": ("false", False),
            f"{_ACTOR}.kl_loss_coef": ("0.5", 0.5),
            f"{_ACTOR}.kl_loss_type": ("mse", "mse"),
            **{f"{_ACTOR}.optim.{name}": other for name, other in _OPTIM.items()},
            "data.train_batch_size": ("6", 6),
            f"{_ACTOR}.ppo_mini_batch_size": ("3", 3),
            f"{_ACTOR}.ppo_epochs": ("2", 2),
            f"{_ACTOR}.ppo_max_token_len_per_gpu": ("512", 512),
            f"{_ACTOR}.fsdp_config.dtype": ("bfloat16", "bfloat16"),
            f"{_ACTOR}.fsdp_config.param_offload": ("true", True),
            f"{_ACTOR}.fsdp_config.optimizer_offload": ("true", True),
            f"{_REF}.fsdp_config.param_offload": ("true", True),
            "data.shuffle": ("false", False),
            f"{_ROLLOUT}.n": ("5", 5),
            f"{_ROLLOUT}.temperature": ("0.9", 0.9),
            f"{_ROLLOUT}.val_kwargs.temperature": ("0.5", 0.5),
            f"{_ROLLOUT}.val_kwargs.top_p": ("0.9", 0.9),
            f"{_ROLLOUT}.val_kwargs.top_k": ("5", 5),
            f"{_ROLLOUT}.val_kwargs.n": ("3", 3),
            "data.max_prompt_length": ("99", 99),
            "data.max_response_length": ("98", 98),
            f"{_ROLLOUT}.max_num_seqs": ("32", 32),
            f"{_ROLLOUT}.name": ("hf", "hf"),
            f"{_ROLLOUT}.gpu_memory_utilization": ("0.9", 0.9),
            f"{_ROLLOUT}.enforce_eager": ("true", True),
            f"{_MODEL}.path": ("{other_model}", "{other_model}"),
            f"{_MODEL}.lora_rank": ("4", 4),
            f"{_MODEL}.lora_alpha": ("4", 4),
            f"{_MODEL}.target_modules": ("[q_proj,v_proj]", ("q_proj", "v_proj")),
            f"{_MODEL}.lora_adapter_path": ("{adapter}", "{adapter}"),
            f"{_MODEL}.override_config": ("{{attn_implementation: eager}}", "eager"),
            "trainer.total_training_steps": ("5", 5),
            "trainer.test_freq": ("3", 3),
            "trainer.save_freq": ("0", -1),  # verl's two ways to say never are one
            "trainer.val_before_train": ("false", False),
            "trainer.max_actor_ckpt_to_keep": ("null", None),
            "trainer.resume_from_path": ("{checkpoint}", "{checkpoint}"),
        },
        (f"{_ROLLOUT}.dtype=bfloat16", f"{_REF}.fsdp_config.dtype=bfloat16", "trainer.resume_mode=resume_path"),
    ),
    "prompts": Change(
        "prompts",
        {
            "data.train_files": ("[{other}]", ("{other}",)),
            "data.val_files": ("{other}", ("{other}",)),
            "data.train_max_samples": ("5", 5),
            "data.val_max_samples": ("1", 1),
            "data.prompt_key": ("question", "question"),
            "data.filter_overlong_prompts": ("true", True),
            "reward.custom_reward_function.path": ("{other_reward}", "{other_reward}"),
            "reward.custom_reward_function.name": ("other", "other"),
            "algorithm.norm_adv_by_std_in_grpo": ("false", False),
            f"{_ROLLOUT}.top_p": ("0.9", 0.9),
            f"{_ROLLOUT}.top_k": ("5", 5),
        },
    ),
    "estimator": Change("prompts", {"algorithm.adv_estimator": ("rloo", "rloo")}),
    "gae": Change(
        "gae",
        {
            "algorithm.gamma": ("0.9", 0.9),
            "algorithm.lam": ("0.8", 0.8),
            "algorithm.kl_penalty": ("mse", "mse"),
            "algorithm.kl_ctrl.kl_coef": ("0.5", 0.5),
            "trainer.critic_warmup": ("1", 1),
            **{f"critic.optim.{name}": other for name, other in _OPTIM.items()},
            "critic.fsdp.dtype": ("bfloat16", "bfloat16"),
            "critic.fsdp.param_offload": ("true", True),
            "critic.fsdp.optimizer_offload": ("true", True),
            "critic.ppo_mini_batch_size": ("4", 4),
            "critic.ppo_max_token_len_per_gpu": ("512", 512),
            "critic.ppo_epochs": ("2", 2),
            "critic.cliprange_value": ("0.3", 0.3),
            "critic.loss_agg_mode": ("seq-mean-token-sum-norm", "seq-mean-token-sum-norm"),
            "critic.loss_scale_factor": ("5", 5),
            "critic.model.path": ("{other_model}", "{other_model}"),
            "critic.model.override_config": ("{{attn_implementation: eager}}", "eager"),
            "critic.model.lora_rank": ("8", 8),
            "critic.model.lora_alpha": ("4", 4),
            "critic.model.target_modules": ("[q_proj]", ("q_proj",)),
        },
    ),
    "score": Change("gae", {"algorithm.use_kl_in_reward": ("false", False)}),
    "classifier": Change(
        "classifier",
        {
            "reward.reward_model.model_path": ("{other_model}", "{other_model}"),
            "reward.reward_model.rollout.dtype": ("float32", "float32"),
            "reward.reward_model.rollout.max_num_batched_tokens": ("99", 99),
        },
    ),
}

# Leaves that feed no setting of their own: read together with another, whose setting changes.
TOGETHER: dict[str, tuple[str, tuple[str, ...], str, Any]] = {
    f"{_ROLLOUT}.val_kwargs.do_sample": (
        "gates",
        (f"{_ROLLOUT}.val_kwargs.do_sample=false",),
        "rollout.val.temperature",
        0.0,
    ),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": (
        "gates",
        (f"{_ACTOR}.optim.lr_warmup_steps_ratio=0.05", "trainer.total_training_steps=300"),
        "optim.lr_warmup_steps",
        15,
    ),
    "critic.optim.lr_warmup_steps_ratio": (
        "gae",
        ("critic.optim.lr_warmup_steps_ratio=0.05", "trainer.total_training_steps=300"),
        "critic.optim.lr_warmup_steps",
        15,
    ),
    "critic.optim.total_training_steps": (
        "gae",
        ("trainer.total_training_steps=5",),
        "critic.optim.total_training_steps",
        5,
    ),
    "reward.reward_model.enable": (
        "prompts",
        (
            "reward.custom_reward_function.path=null",
            "reward.reward_model.enable=true",
            f"reward.reward_model.model_path={MODEL}",
            "reward.reward_model.rollout.name=vllm",
        ),
        "reward.model_path",
        Path(MODEL),
    ),
    # eight prompts in batches of four, three times
    "trainer.total_epochs": (
        "prompts",
        ("trainer.total_epochs=3", "trainer.total_training_steps=null"),
        "trainer.total_training_steps",
        6,
    ),
}  # fmt: skip

# Leaves that feed nothing and are checked: the one value they may have is another leaf's, or a word.
ONE_VALUE = {
    f"{_ACTOR}.policy_loss.loss_mode": ("gates", "gspo"),
    f"{_REF}.fsdp_config.dtype": ("gates", "bfloat16"),
    f"{_ROLLOUT}.prompt_length": ("gates", "7"),
    f"{_ROLLOUT}.response_length": ("gates", "7"),
    "algorithm.kl_ctrl.type": ("gae", "adaptive"),
    "critic.enable": ("prompts", "true"),
    "trainer.max_critic_ckpt_to_keep": ("gae", "7"),
}
# Names the folder of a run, and switches resume_from_path: tests of their own.
ELSEWHERE = {"trainer.experiment_name", "trainer.resume_mode"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("leaves")


@pytest.fixture(scope="session")
def names(folder: Path) -> dict[str, str]:
    """Files and folders that the changed values name."""
    found = {name: folder / name for name in ("other_model", "adapter", "global_step_3")}
    for path in found.values():
        path.mkdir()
    shutil.copy(Path(MODEL) / "config.json", found["other_model"])
    (found["adapter"] / "adapter_config.json").write_text("{}")
    (found["global_step_3"] / "manifest.json").write_text("{}")
    write_rows(folder / "other.parquet", prompt_rows(8))
    (folder / "other_reward.py").write_text("")
    places = {"other": folder / "other.parquet", "other_reward": folder / "other_reward.py"}
    return {name: str(path) for name, path in {**found, **places, "checkpoint": found["global_step_3"]}.items()}


def setting(settings: SoloSettings, path: str) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def plain(value: Any) -> Any:
    """Paths as texts."""
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return str(value) if isinstance(value, Path) else value


def expected_of(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, tuple):
        return tuple(expected_of(item, names) for item in value)
    return value.format(**names) if isinstance(value, str) else value


def accepted(disposition: str) -> list[str]:
    return [path for path in verl_tree().leaves if rule_of(path).disposition == disposition]


def test_every_leaf_that_feeds_a_setting_is_in_the_table() -> None:
    feeding = {path for path in verl_tree().leaves if rule_of(path).targets}
    listed = [path for change in CHANGES.values() for path in change.leaves]
    assert len(listed) == len(set(listed))
    assert feeding == set(listed) | {"critic.optim.total_training_steps"}


def test_every_leaf_that_is_checked_and_feeds_nothing_is_in_a_table() -> None:
    exact = accepted("exact") + accepted("semantically_conformant")
    checked = {path for path in exact if rule_of(path).reads and not rule_of(path).targets}
    assert checked | {"critic.optim.total_training_steps"} == set(TOGETHER) | set(ONE_VALUE) | ELSEWHERE


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_leaf_changes_its_setting(name: str, folder: Path, names: dict[str, str]) -> None:
    change = CHANGES[name]
    before, _ = compile_settings(base(change.kind, folder))
    lines = [f"{path}={value.format(**names)}" for path, (value, _) in change.leaves.items()]
    after, plan = compile_settings(override(base(change.kind, folder), [*lines, *change.with_them]))
    assert {entry.disposition for entry in plan if entry.field in change.leaves} <= {
        "exact",
        "semantically_conformant",
        "locally_lowered",
    }
    for path, (_, other) in change.leaves.items():
        for target in rule_of(path).targets:
            assert plain(setting(after, target)) == expected_of(other, names), path
            assert setting(before, target) != setting(after, target), path


@pytest.mark.parametrize("path", TOGETHER)
def test_a_leaf_read_with_another_changes_that_ones_setting(path: str, folder: Path) -> None:
    kind, lines, target, expected = TOGETHER[path]
    before, _ = compile_settings(base(kind, folder))
    after, _ = compile_settings(override(base(kind, folder), lines))
    assert setting(after, target) == expected
    assert setting(before, target) != expected


@pytest.mark.parametrize("path", ONE_VALUE)
def test_a_leaf_with_one_value_is_refused_with_another(path: str, folder: Path) -> None:
    kind, value = ONE_VALUE[path]
    with pytest.raises(Refused) as refused:
        compile_settings(override(base(kind, folder), [f"{path}={value}"]))
    assert any(line.startswith(f"{path}: got") for line in str(refused.value).splitlines())


@pytest.mark.parametrize("kind", ["gates", "prompts", "gae", "classifier"])
def test_a_leaf_that_feeds_nothing_is_refused_when_it_changes_in_every_kind_of_run(kind: str, folder: Path) -> None:
    cfg = base(kind, folder).copy()
    OmegaConf.set_struct(cfg, False)
    still = [entry.field for entry in plan_fields(cfg)[1] if entry.field in verl_tree().leaves]
    idle = [path for path in still if not rule_of(path).reads and path not in verl_tree().open]
    for path in idle:
        OmegaConf.update(cfg, path, "an odd value", force_add=True)
    plan = {entry.field: entry for entry in plan_fields(cfg)[1]}
    copies = {path for path in idle if "${" in str(verl_tree().leaves[path]) or rule_of(path).same_as}
    assert [path for path in idle if plan[path].refusal is None and path not in copies] == []
    assert len(idle) > 600


@pytest.mark.parametrize("kind", ["gates", "prompts", "gae", "classifier"])
def test_an_inactive_leaf_that_would_feed_a_setting_is_refused_when_it_changes(kind: str, folder: Path) -> None:
    cfg = base(kind, folder).copy()
    plan = {entry.field: entry for entry in plan_fields(cfg)[1]}
    inactive = [p for p in verl_tree().leaves if rule_of(p).targets and plan[p].disposition == "informational_only"]
    OmegaConf.set_struct(cfg, False)
    for path in inactive:
        OmegaConf.update(cfg, path, "an odd value", force_add=True)
    after = {entry.field: entry for entry in plan_fields(cfg)[1]}
    assert [path for path in inactive if after[path].refusal is None] == []
    assert inactive


def test_resume_mode_decides_whether_a_path_is_read(folder: Path, names: dict[str, str]) -> None:
    path = f"trainer.resume_from_path={names['checkpoint']}"
    read, _ = compile_settings(override(base("gates", folder), [path, "trainer.resume_mode=resume_path"]))
    assert str(read.trainer.resume_from) == names["checkpoint"]
    with pytest.raises(Refused, match=r"trainer\.resume_from_path"):
        compile_settings(override(base("gates", folder), [path, "trainer.resume_mode=disable"]))
