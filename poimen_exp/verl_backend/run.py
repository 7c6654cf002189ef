"""One run on verl: refuse early, start Ray, train, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from poimen_exp.adapters.hashing import base_model_sha256
from poimen_exp.solo.checkpoint import Progress
from poimen_exp.tracking.result import RunResult, Status
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.tracker import Tracker, say_on_stderr
from poimen_exp.verl_backend.adapter import write_adapter
from poimen_exp.verl_backend.checkpoint import ResumePoint, newest
from poimen_exp.verl_backend.launch import prepare_environment, ray_for
from poimen_exp.verl_backend.monitor import Monitor
from poimen_exp.verl_backend.overlay import verl_config
from poimen_exp.verl_backend.preflight import check_tasks, preflight, validate
from poimen_exp.verl_backend.reader import Reader, open_reader
from poimen_exp.verl_backend.settings import VerlSettings, settings_of
from poimen_exp.verl_backend.watch import Liveness, PhaseClock, naming_the_dead

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run_verl(cfg: DictConfig, folder: RunFolder, tracker: Tracker) -> RunResult:
    """Trains on verl, or goes on from the newest complete checkpoint in ``folder``.

    Raises:
        Refused: configuration, model, corpus or machine do not allow the run; Ray was not started.
        RunFailed: the run began and must not go on.
    """
    preflight(cfg)
    prepare_environment(cfg.trainer.device)
    settings = settings_of(cfg)
    reader = open_reader(settings.reader)
    tasks = {"train": len(reader.corpus.split("train")), "val": len(reader.corpus.split("val"))}
    check_tasks(cfg, tasks)
    identity = run_identity(cfg, reader)
    resume = newest(folder, identity)
    if resume is not None:
        say_on_stderr(f"going on from {resume.path}")
    config = verl_config(cfg, folder.checkpoints, tasks, resume)
    validate(config)
    tracker.rewind(*((resume.progress.step, resume.metrics_bytes) if resume else (0, 0)))
    monitor = _monitor(cfg, settings, resume)
    if not _done(cfg, monitor):
        _train(cfg, config, settings, monitor, tracker, identity)
    return _result(cfg, settings, reader, monitor, folder)


def run_identity(cfg: DictConfig, reader: Reader) -> dict[str, str]:
    """What must not change between the parts of one run, as in solo."""
    model = cfg.actor_rollout_ref.model
    return {
        "corpus": reader.corpus.sha256,
        "model": base_model_sha256(Path(model.path)),
        "seed": str(cfg.seed),
        "alpha": repr(float(cfg.alpha)),
        "lora": f"rank {model.lora_rank}, alpha {model.lora_alpha}",
    }


def _monitor(cfg: DictConfig, settings: VerlSettings, resume: ResumePoint | None) -> Monitor:
    per_step = settings.mini_batches * cfg.actor_rollout_ref.actor.ppo_epochs
    progress = resume.progress if resume else Progress()
    return Monitor(settings, progress, per_step * cfg.trainer.total_training_steps, say_on_stderr)


def _done(cfg: DictConfig, monitor: Monitor) -> bool:
    return monitor.converged or monitor.progress.step >= cfg.trainer.total_training_steps


def _train(
    cfg: DictConfig,
    config: DictConfig,
    settings: VerlSettings,
    monitor: Monitor,
    tracker: Tracker,
    identity: dict[str, str],
) -> None:
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ

    from poimen_exp.verl_backend.trainer import GateTrainer, RunParts

    clock, liveness = PhaseClock(settings.stall_timeout_s), Liveness()
    with clock.running(), ray_for(config), naming_the_dead(liveness, clock):
        keep, save_freq = cfg.trainer.max_actor_ckpt_to_keep, cfg.trainer.save_freq
        parts = RunParts(settings, monitor, tracker, clock, liveness, identity, save_freq, keep, say_on_stderr)
        trainer = GateTrainer(config, parts)
        trainer.init()
        manager = AgentLoopManagerTQ.create(
            config=config,
            llm_client=trainer.get_llm_client(),
            teacher_client=trainer.get_teacher_client(),
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        trainer.fit(manager)


def _result(cfg: DictConfig, settings: VerlSettings, reader: Reader, monitor: Monitor, folder: RunFolder) -> RunResult:
    progress = monitor.progress
    short = progress.step < cfg.trainer.total_training_steps
    status: Status = "converged" if monitor.converged and short else "completed"
    adapter = write_adapter(cfg, settings, reader, progress, folder)
    return RunResult(
        status=status,
        objective_value=progress.best_value,
        step=progress.step,
        best_step=progress.best_step,
        adapter=adapter,
    )
