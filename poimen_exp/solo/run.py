"""A solo run from settings to adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from poimen_exp.adapters.export import export_adapter
from poimen_exp.adapters.hashing import base_model_sha256, sha256_of_file
from poimen_exp.adapters.manifest import WEIGHTS_NAME
from poimen_exp.errors import Refused
from poimen_exp.solo.checkpoint import LoadedCheckpoint, Progress, Trained, load_checkpoint, load_progress, restore_rng
from poimen_exp.solo.critic import Critic
from poimen_exp.solo.engines import make_engine
from poimen_exp.solo.loop import Loop
from poimen_exp.solo.policy import Policy, keep_freed_memory, pick_device
from poimen_exp.solo.reference import named_adapter
from poimen_exp.solo.seeds import seed_everything
from poimen_exp.solo.settings import OptimSettings, SoloSettings
from poimen_exp.solo.setup import Setup, require_full_batch, task_identity
from poimen_exp.solo.update import Updater
from poimen_exp.tracking.metrics_log import by_step, read_metrics
from poimen_exp.tracking.result import RunResult
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.tracker import Tracker

Say = Callable[[str], None]


def run_solo(settings: SoloSettings, setup: Setup, tracker: Tracker, say: Say, resume: bool = False) -> RunResult:
    """Trains, and leaves the adapter of ``Progress.adapter_step``.

    Args:
        resume: go on from the newest complete checkpoint of the run folder, if there is one.
    """
    folder = tracker.folder
    loop = build_loop(settings, setup, tracker, say, _checkpoint(settings, folder, say, resume))
    warmup = settings.trainer.critic_warmup
    if loop.progress.step < warmup - 1:
        say(f"trainer.critic_warmup={warmup}: until step {warmup} only the critic learns, the actor stays as it is")
    status = loop.train()
    progress = loop.progress
    adapter = write_adapter(settings, setup, loop, folder)
    return RunResult(
        status=status,
        objective_value=progress.best_value,
        step=progress.step,
        best_step=progress.best_step,
        adapter=adapter,
    )


def build_loop(
    settings: SoloSettings, setup: Setup, tracker: Tracker, say: Say, checkpoint: LoadedCheckpoint | None
) -> Loop:
    """Roles, engine and task of a run, fresh or as a checkpoint left them."""
    device = pick_device(settings.device)
    if device.type == "cpu":
        keep_freed_memory()
    pad_id = setup.codec.pad_id
    require_full_batch(settings, setup.train_size)
    seed_everything(settings.seed)
    offload = settings.offload
    policy = Policy(settings.model, device, offload.actor)
    engine = make_engine(settings, policy, setup.codec, say)
    engine.sleep()
    critic = None
    if settings.critic is not None:
        critic = Critic(settings.critic, pad_id, settings.step.train_batch_size, device, offload)
    identity = run_identity(settings, setup)
    progress, prepared = Progress(), None
    if checkpoint is None:
        with policy.on_device():
            prepared = setup.prepare(settings, policy, say)
        reference = prepared.reference
        if settings.reference is not None:
            reference = named_adapter(policy, settings.reference)
        tracker.rewind(-1, 0)
    else:
        _require_same(checkpoint.state.identity, identity, tracker.folder)
        policy.load_state(checkpoint.state.actor.weights)
        with policy.on_device():
            policy.sync()
        reference = checkpoint.state.reference
        progress = checkpoint.progress
    reference = {name: value.to("cpu" if offload.reference else device) for name, value in reference.items()}
    temperature, optim = settings.rollout.train.temperature, settings.optim
    updater = Updater(
        policy, reference, pad_id, temperature, settings.loss, optim, settings.step, offload.actor_optimizer
    )
    if checkpoint is not None:
        _restore(updater, checkpoint.state.actor)
        if critic is not None:
            assert checkpoint.state.critic is not None  # the identities are equal
            critic.load_state(checkpoint.state.critic.weights)
            _restore(critic, checkpoint.state.critic)
        restore_rng(checkpoint.rng)
        own = checkpoint.folder == tracker.folder.path
        tracker.rewind(progress.step if own else -1, checkpoint.metrics_bytes if own else 0)
    engine.sync()
    task = setup.task(settings, engine, device)
    loop = Loop(settings, task, policy, updater, engine, reference, identity, tracker, say, progress, critic)
    if prepared is not None:
        loop.opening = (prepared.metrics, prepared.counts)
    return loop


def _restore(role: Updater | Critic, trained: Trained) -> None:
    with role.learning():  # what is loaded lands beside the weights
        role.optimizer.load_state_dict(dict(trained.optimizer))
    role.schedule.load_state_dict(dict(trained.schedule))


def _checkpoint(settings: SoloSettings, folder: RunFolder, say: Say, resume: bool) -> LoadedCheckpoint | None:
    """Where a run goes on from: its own newest checkpoint, or the one of another run that it is to begin with."""
    own = newest_checkpoint(folder, say) if resume else None
    if own is not None or settings.trainer.resume_from is None:
        return own
    say(f"beginning with {settings.trainer.resume_from}")
    return begun_elsewhere(load_checkpoint(settings.trainer.resume_from))


def begun_elsewhere(checkpoint: LoadedCheckpoint) -> LoadedCheckpoint:
    """A checkpoint for a new run: its step, counters and weights go on; what was best there is not known here."""
    kept = checkpoint.progress
    progress = Progress(step=kept.step, first_step=kept.step, optimizer_steps=kept.optimizer_steps)
    return replace(checkpoint, progress=replace(progress, groups=kept.groups, samples=kept.samples))


def newest_checkpoint(folder: RunFolder, say: Say) -> LoadedCheckpoint | None:
    """The newest complete checkpoint, named aloud; None where a run was killed before its first."""
    steps = folder.checkpoint_steps()
    if not steps:
        say(f"{folder.path}: no complete checkpoint; the run starts again from step 0")
        return None
    say(f"going on from {folder.checkpoint(steps[-1])}")
    return load_checkpoint(folder.checkpoint(steps[-1]))


def run_identity(settings: SoloSettings, setup: Setup) -> dict[str, str]:
    """What must not change between the parts of one run."""
    identity = setup.identity(settings) | _settings_identity(settings)
    identity["model"] = base_model_sha256(settings.model.path)
    if settings.reference is not None:
        identity["reference"] = sha256_of_file(settings.reference / WEIGHTS_NAME)
    if settings.critic is not None:
        identity["critic"] = f"{base_model_sha256(settings.critic.path)}, rank {settings.critic.lora_rank}"
    return identity


def _settings_identity(settings: SoloSettings) -> dict[str, str]:
    """The part of it that no file is read for."""
    identity = task_identity(settings) | {
        "seed": str(settings.seed),
        "lora": f"rank {settings.model.lora_rank}, alpha {settings.model.lora_alpha}",
        "optimizer": _fixed_optimizer(settings.optim),
        "batch": f"{settings.step.train_batch_size} prompts",  # a step's place in the data is counted in batches
    }
    if settings.critic is not None:
        identity["critic optimizer"] = _fixed_optimizer(settings.critic.optim)
    return identity


def _fixed_optimizer(optim: OptimSettings) -> str:
    """What a checkpoint's optimizer and schedule bring with them: another value would be accepted and not used."""
    return f"lr {optim.lr!r}, weight decay {optim.weight_decay!r}, betas {optim.betas!r}"


def require_same_run(settings: SoloSettings, setup: Setup | None, folder: RunFolder) -> None:
    """Refuses to go on with a run as another one, before anything of it is touched.

    Args:
        setup: None leaves out what its files decide: what the settings refuse need not wait for them.

    Raises:
        Refused: what differs, then and now.
    """
    steps = folder.checkpoint_steps()
    if not steps:
        return
    saved = load_progress(folder.checkpoint(steps[-1]))[1]
    if setup is not None:
        _require_same(saved, run_identity(settings, setup), folder)
        return
    now = _settings_identity(settings)
    _require_same({key: value for key, value in saved.items() if key in now}, now, folder)


def _require_same(saved: Mapping[str, str], now: Mapping[str, str], folder: RunFolder) -> None:
    if saved != now:
        keys = sorted(key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key))
        raise Refused(
            f"{folder.path}: the run was started with another {', '.join(keys)}: "
            + "; ".join(f"{key}: {saved.get(key)} then, {now.get(key)} now" for key in keys)
        )


def write_adapter(settings: SoloSettings, setup: Setup, loop: Loop, folder: RunFolder) -> Path:
    """Writes ``adapter/``: the weights of ``Progress.adapter_step``."""
    progress = loop.progress
    fresh = settings.model.adapter is None and settings.gates.warm_start_steps == 0
    weights = settings.trainer.adapter_weights
    step = progress.adapter_step(fresh, weights)
    if weights == "best" and step != progress.best_step and progress.best_step is not None:
        loop.say(f"no validation was better than the base model's (step 0): adapter/ is that of step {step}")
    if step != progress.step:
        best = load_checkpoint(folder.checkpoint(step))
        loop.policy.load_state({name: value.to(loop.policy.device) for name, value in best.state.actor.weights.items()})
        with loop.policy.on_device():
            loop.policy.sync()
    line = by_step(read_metrics(folder.metrics).lines).get(step)
    metrics = {} if line is None else {k: v for k, v in line.metrics.items() if k.startswith("val/")}
    info = setup.adapter_info(settings, folder.run_id, step, metrics)
    return export_adapter(loop.policy.model, folder.adapter, info)


def extended(settings: SoloSettings, total_training_steps: int) -> SoloSettings:
    """The same settings with another number of steps: a run goes on to more."""
    trainer = replace(settings.trainer, total_training_steps=total_training_steps)
    optim = replace(settings.optim, total_training_steps=total_training_steps)
    return replace(settings, trainer=trainer, optim=optim)
