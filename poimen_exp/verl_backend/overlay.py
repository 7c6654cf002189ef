"""The configuration that verl gets: the composed one, with the seams that this backend fills; nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from poimen_exp.verl_backend.checkpoint import ResumePoint

if TYPE_CHECKING:
    from omegaconf import DictConfig

AGENT_LOOPS = Path(__file__).with_name("agent_loop.yaml")


def verl_config(cfg: DictConfig, checkpoints: Path, tasks: dict[str, int], resume: ResumePoint | None) -> DictConfig:
    """A resolved copy of ``cfg`` for verl.

    Args:
        checkpoints: folder of the run's checkpoints.
        tasks: number of tasks of the splits ``train`` and ``val``.
        resume: checkpoint to go on from.
    """
    from omegaconf import OmegaConf, open_dict

    out: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    with open_dict(out):
        for path, value in _seams(checkpoints, tasks, resume).items():
            OmegaConf.update(out, path, value, force_add=True)
        if out.actor_rollout_ref.model.lora_rank > 0:
            # The base never changes: a checkpoint holds the adapter and its optimizer state.
            out.actor_rollout_ref.actor.checkpoint.save_lora_only = True
        if out.trainer.device == "cpu":
            out.actor_rollout_ref.actor.use_torch_compile = False
            out.actor_rollout_ref.actor.fsdp_config.use_torch_compile = False
            out.actor_rollout_ref.ref.fsdp_config.use_torch_compile = False
    OmegaConf.set_struct(out, True)
    config: DictConfig = out
    return config


def _seams(checkpoints: Path, tasks: dict[str, int], resume: ResumePoint | None) -> dict[str, Any]:
    seams: dict[str, Any] = {
        "data.custom_cls.path": "pkg://poimen_exp.verl_backend.dataset",
        "data.custom_cls.name": "GateDataset",
        "data.train_files": {"split": "train", "tasks": tasks["train"]},
        "data.val_files": {"split": "val", "tasks": tasks["val"]},
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(AGENT_LOOPS),
        "actor_rollout_ref.rollout.agent.default_agent_loop": "poimen_gates",
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "reward.num_workers": 0,  # the agent loop scores; each of verl's 8 would import verl and wait for nothing
        "trainer.v1.sampler.custom_sampler.path": "pkg://poimen_exp.verl_backend.replay",
        "trainer.v1.sampler.custom_sampler.name": "GateReplayBuffer",
        "trainer.logger": [],  # the tracker reports
        "trainer.default_local_dir": str(checkpoints),
        "trainer.save_freq": -1,  # the trainer saves after a step is recorded, not before
        "trainer.max_actor_ckpt_to_keep": None,  # and keeps the best one
        "trainer.resume_mode": "disable",
        "transfer_queue.enable": True,
        # A row a turn: 128 prompts x 16 rollouts x 50 turns pass verl's limit of 100,000, an error mid-run.
        "transfer_queue.backend.SimpleStorage.total_storage_size": None,
    }
    if resume is not None:
        seams |= {
            "trainer.resume_mode": "resume_path",
            "trainer.resume_from_path": str(resume.path),
            "trainer.val_before_train": False,  # that step was validated and recorded
        }
    return seams
