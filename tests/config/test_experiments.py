from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from poimen_exp.config.compose import compose_config
from poimen_exp.config.paths import conf_dir
from poimen_exp.config.schema import typed_keys
from poimen_exp.config.tree import lookup, resolved
from poimen_exp.gates.types import Sampling
from poimen_exp.solo.plan import compile_settings

_AR = "actor_rollout_ref"

# Table 3 of GRU-Mem, each value where verl (or we) expect it.
TABLE_3: dict[str, Any] = {
    "corpus.chunk_tokens": 5000,
    "data.max_prompt_length": 8192,
    "data.max_response_length": 2048,
    f"{_AR}.rollout.prompt_length": 8192,
    f"{_AR}.rollout.response_length": 2048,
    f"{_AR}.actor.clip_ratio": 0.2,
    f"{_AR}.actor.clip_ratio_low": 0.2,
    f"{_AR}.actor.clip_ratio_high": 0.2,
    f"{_AR}.actor.optim.lr": 1e-6,
    f"{_AR}.actor.optim.lr_warmup_steps": 20,
    f"{_AR}.rollout.temperature": 1.0,
    f"{_AR}.rollout.top_p": 1.0,
    f"{_AR}.rollout.do_sample": True,
    f"{_AR}.rollout.val_kwargs.do_sample": True,
    f"{_AR}.rollout.val_kwargs.temperature": 1.0,
    f"{_AR}.rollout.val_kwargs.top_p": 0.7,
    "data.train_batch_size": 128,
    f"{_AR}.rollout.n": 16,
    f"{_AR}.actor.ppo_mini_batch_size": 128,
    "alpha": 0.9,
}

# What the table leaves open: MemAgent's code and our own task.
BESIDE_TABLE_3: dict[str, Any] = {
    f"{_AR}.model.path": "Qwen/Qwen2.5-3B-Instruct",
    f"{_AR}.model.lora_rank": 16,
    f"{_AR}.model.lora_alpha": 32,
    f"{_AR}.actor.use_kl_loss": True,
    f"{_AR}.actor.kl_loss_coef": 1e-3,
    f"{_AR}.actor.kl_loss_type": "low_var_kl",
    f"{_AR}.actor.entropy_coeff": 0,
    f"{_AR}.actor.clip_ratio_c": 3.0,
    f"{_AR}.actor.loss_agg_mode": "token-mean",
    f"{_AR}.actor.grad_clip": 1.0,
    f"{_AR}.actor.optim.clip_grad": 1.0,
    f"{_AR}.actor.optim.weight_decay": 0.01,
    f"{_AR}.actor.optim.lr_scheduler_type": "constant",
    "algorithm.adv_estimator": "poimen_gates",
    "algorithm.use_kl_in_reward": False,
    "critic.enable": False,
    "gates.layout": "memory_first",
    "gates.memory_tokens": 1024,
}

EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(conf_dir().iterdir())
    if folder.name not in ("experiment", "alpha_sweep") and any(folder.glob("*.yaml"))
}


def test_the_paper_has_every_value_of_table_3() -> None:
    tree = resolved(compose_config(["+experiment=paper"]))
    wanted = TABLE_3 | BESIDE_TABLE_3
    assert {path: lookup(tree, path) for path in wanted} == wanted


def test_a_bare_command_is_the_paper_key_for_key() -> None:
    assert compose_config() == compose_config(["+experiment=paper"])


def test_values_that_table_3_does_not_hold_are_marked_in_the_file() -> None:
    lines = (conf_dir() / "experiment" / "paper.yaml").read_text().splitlines()
    for name in ("use_kl_loss:", "kl_loss_coef:", "kl_loss_type:", "entropy_coeff:", "clip_ratio_c:", "weight_decay:"):
        (line,) = [line for line in lines if name in line]
        assert "not in Table 3" in line


def test_the_sampler_of_the_paper_gets_table_3_in_training_and_validation(paper: DictConfig) -> None:
    settings, _ = compile_settings(paper)
    assert settings.rollout.train == Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=2048)
    assert settings.rollout.val == Sampling(temperature=1.0, top_p=0.7, top_k=-1, max_tokens=2048)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_with_known_keys_and_typed_values(experiment: str) -> None:
    cfg = compose_config([f"+experiment={experiment}"])
    assert typed_keys(resolved(cfg)).alpha == 0.9
    assert cfg.trainer.experiment_name == experiment


@pytest.mark.parametrize("experiment", ["quickstart"])
@pytest.mark.parametrize("choice", range(max(len(names) for names in GROUPS.values())))
def test_every_choice_of_every_group_composes_over_an_experiment(experiment: str, choice: int) -> None:
    groups = [f"{group}={names[min(choice, len(names) - 1)]}" for group, names in GROUPS.items()]
    typed_keys(resolved(compose_config([f"+experiment={experiment}", *groups])))


def test_rank_32_keeps_the_ratio_of_alpha_to_rank() -> None:
    model = compose_config(["lora=rank32"]).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (32, 64)


def test_the_rank_of_the_command_line_wins_over_an_experiments_own() -> None:
    model = compose_config(["+experiment=verl_smoke", "lora=rank16"]).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (16, 32)


def test_one_clip_ratio_moves_both_sides() -> None:
    actor = compose_config([f"{_AR}.actor.clip_ratio=0.3"]).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.3)


def test_the_quickstart_uses_what_ships() -> None:
    cfg = compose_config(["+experiment=quickstart"])
    assert Path(cfg.corpus.path).parts[-3:] == ("assets", "quickstart", "corpus")
    assert Path(cfg.actor_rollout_ref.model.path).parts[-3:] == ("assets", "quickstart", "model")


def test_the_quickstart_compiles_for_one_device_as_it_is(places: list[str]) -> None:
    settings, _ = compile_settings(compose_config(["+experiment=quickstart", places[1]]))
    assert settings.model.dtype == "float32"
    assert not settings.loss.use_kl_loss


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_dir() / "alpha_sweep").glob("*.yaml")))
def test_every_alpha_sweep_sweeps_alpha_and_seed(name: str) -> None:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config", [f"+alpha_sweep={name}"], return_hydra_config=True)
    assert cfg.hydra.mode.name == "MULTIRUN"
    assert sorted(cfg.hydra.sweeper.params) == ["alpha", "seed"]
    assert OmegaConf.select(cfg, "hydra.sweeper._target_").endswith("PoimenSweeper")
