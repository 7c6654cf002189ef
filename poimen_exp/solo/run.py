"""A solo run from settings to adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from poimen_exp.adapters.export import export_adapter
from poimen_exp.adapters.hashing import base_model_sha256
from poimen_exp.adapters.manifest import AdapterInfo
from poimen_exp.errors import Refused
from poimen_exp.solo.checkpoint import LoadedCheckpoint, Progress, load_checkpoint, restore_rng
from poimen_exp.solo.engine import TransformersEngine
from poimen_exp.solo.gate_task import GateTask
from poimen_exp.solo.loop import Loop
from poimen_exp.solo.policy import Policy, pick_device
from poimen_exp.solo.seeds import seed_everything
from poimen_exp.solo.settings import SoloSettings
from poimen_exp.solo.setup import GateSetup
from poimen_exp.solo.update import Updater
from poimen_exp.solo.warm_start import warm_start
from poimen_exp.tracking.metrics_log import by_step, read_metrics
from poimen_exp.tracking.result import RunResult
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.tracker import Tracker

Say = Callable[[str], None]


def run_solo(settings: SoloSettings, setup: GateSetup, tracker: Tracker, say: Say, resume: bool = False) -> RunResult:
    """Trains, and leaves the adapter of the best validation (of the last step where there was none).

    Args:
        resume: go on from the newest complete checkpoint of the run folder, if there is one.
    """
    folder = tracker.folder
    loop = build_loop(settings, setup, tracker, say, newest_checkpoint(folder, say) if resume else None)
    status = loop.train()
    progress = loop.progress
    adapter = export_best(settings, setup, loop, folder)
    return RunResult(
        status=status,
        objective_value=progress.best_value,
        step=progress.step,
        best_step=progress.best_step,
        adapter=adapter,
    )


def build_loop(
    settings: SoloSettings, setup: GateSetup, tracker: Tracker, say: Say, checkpoint: LoadedCheckpoint | None
) -> Loop:
    """Policy, engine, task and optimizer of a run, fresh or as a checkpoint left them."""
    device = pick_device(settings.device)
    pad_id = setup.codec.pad_id
    train = setup.corpus.split("train")
    if len(train) < settings.step.train_batch_size:
        raise Refused(
            f"data.train_batch_size={settings.step.train_batch_size}: the training split has {len(train)} tasks; "
            "expected at least one full batch"
        )
    seed_everything(settings.seed)
    policy = Policy(settings.model, device)
    engine = TransformersEngine(policy.sampler, setup.codec.stop_ids, pad_id, settings.rollout.max_rows)
    task = GateTask(
        train,
        setup.val_tasks(settings.corpus.max_val_tasks),
        setup.protocol,
        engine,
        settings.gates,
        settings.rollout,
        settings.alpha,
        settings.seed,
        device,
    )
    identity = run_identity(settings, setup)
    progress = Progress()
    if checkpoint is None:
        budget = settings.step.micro_batch_tokens
        warm_start(policy, setup.protocol, train, settings.gates, pad_id, budget, settings.seed, say)
        reference = policy.state()
        tracker.rewind(-1, 0)
    else:
        _require_same(checkpoint.state.identity, identity, tracker.folder)
        policy.load_state({name: value.to(device) for name, value in checkpoint.state.adapter.items()})
        policy.sync()
        reference = {name: value.to(device) for name, value in checkpoint.state.reference.items()}
        progress = checkpoint.progress
    updater = Updater(
        policy,
        reference,
        pad_id,
        settings.rollout.train.temperature,
        settings.loss,
        settings.optim,
        settings.step,
    )
    if checkpoint is not None:
        updater.optimizer.load_state_dict(dict(checkpoint.state.optimizer))
        updater.schedule.load_state_dict(dict(checkpoint.state.schedule))
        restore_rng(checkpoint.rng)
        tracker.rewind(progress.step, checkpoint.metrics_bytes)
    return Loop(settings, task, policy, updater, reference, identity, tracker, say, progress)


def newest_checkpoint(folder: RunFolder, say: Say) -> LoadedCheckpoint | None:
    """The newest complete checkpoint, named aloud; None where a run was killed before its first."""
    steps = folder.checkpoint_steps()
    if not steps:
        say(f"{folder.path}: no complete checkpoint; the run starts again from step 0")
        return None
    say(f"going on from {folder.checkpoint(steps[-1])}")
    return load_checkpoint(folder.checkpoint(steps[-1]))


def run_identity(settings: SoloSettings, setup: GateSetup) -> dict[str, str]:
    """What must not change between the parts of one run."""
    return {
        "corpus": setup.corpus.sha256,
        "model": base_model_sha256(settings.model.path),
        "seed": str(settings.seed),
        "alpha": repr(settings.alpha),
        "lora": f"rank {settings.model.lora_rank}, alpha {settings.model.lora_alpha}",
    }


def _require_same(saved: object, now: dict[str, str], folder: RunFolder) -> None:
    if saved != now:
        assert isinstance(saved, dict)
        keys = sorted(key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key))
        raise Refused(
            f"{folder.path}: the run was started with another {', '.join(keys)}: "
            + "; ".join(f"{key}: {saved.get(key)} then, {now.get(key)} now" for key in keys)
        )


def export_best(settings: SoloSettings, setup: GateSetup, loop: Loop, folder: RunFolder) -> Path:
    """Writes ``adapter/``: the weights of the best validation, or of the last step where none was made."""
    progress = loop.progress
    step = progress.step if progress.best_step is None else progress.best_step
    if step != progress.step:
        best = load_checkpoint(folder.checkpoint(step))
        loop.policy.load_state({name: value.to(loop.policy.device) for name, value in best.state.adapter.items()})
        loop.policy.sync()
    line = by_step(read_metrics(folder.metrics).lines).get(step)
    info = AdapterInfo(
        base_model=settings.model.path,
        dtype=settings.model.dtype,
        layout=settings.gates.layout,
        wording=settings.gates.wording,
        memory_tokens=settings.gates.memory_tokens,
        chunk_tokens=settings.corpus.chunk_tokens,
        response_tokens=settings.rollout.val.max_tokens,
        corpus_id=setup.corpus.corpus_id,
        corpus_sha256=setup.corpus.sha256,
        label_status=setup.corpus.label_status,
        run_id=folder.path.name,
        step=step,
        metrics={} if line is None else {k: v for k, v in line.metrics.items() if k.startswith("val/")},
    )
    return export_adapter(loop.policy.model, folder.adapter, info)


def extended(settings: SoloSettings, total_training_steps: int) -> SoloSettings:
    """The same settings with another number of steps: a run goes on to more."""
    trainer = replace(settings.trainer, total_training_steps=total_training_steps)
    optim = replace(settings.optim, total_training_steps=total_training_steps)
    return replace(settings, trainer=trainer, optim=optim)
