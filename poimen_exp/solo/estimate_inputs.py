"""What the estimate is made from: sizes of a model folder, lengths of a corpus, rates of this device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from poimen_exp.errors import Refused
from poimen_exp.gates.types import ReadingTask
from poimen_exp.solo.estimate import Estimate, estimate, needed_offload
from poimen_exp.solo.estimate_types import Critic, ModelShape, Rates, Rows, Workload
from poimen_exp.solo.settings import ModelSettings, SoloSettings

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from poimen_exp.gates.protocol import GateProtocol
    from poimen_exp.solo.prompt_setup import PromptSetup
    from poimen_exp.solo.setup import GateSetup, Setup

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_SAMPLED_TASKS = 24
_Kind = Literal["policy", "value"]


def run_estimate(settings: SoloSettings, setup: Setup, rates: Rates, device: torch.device, done: int = 0) -> Estimate:
    """The estimate of what is left, after ``done`` steps, of a run of these tasks on this device, which offloads as it
    needs to there.
    """
    from poimen_exp.solo.prompt_setup import PromptSetup
    from poimen_exp.solo.setup import GateSetup

    if isinstance(setup, GateSetup):
        per_rollout, val_tasks = _readings(settings, setup)
    else:
        assert isinstance(setup, PromptSetup)
        per_rollout, val_tasks = _responses(settings, setup)
    turns = [len(rows) for rows in per_rollout]
    mean_turns = sum(turns) / len(turns)
    flat = [row for rows in per_rollout for row in rows]
    work = on_device(workload(settings, flat, mean_turns, max(turns), val_tasks, done), settings, device)
    model, critic = model_shape(settings.model), critic_of(settings, mean_turns)
    return estimate(model, work, rates, critic, needed_offload(model, work, critic, settings.offload))


def on_device(work: Workload, settings: SoloSettings, device: torch.device) -> Workload:
    """``work`` with what the device's memory decides: the share that vLLM takes, the room for slots."""
    import torch

    from poimen_exp.solo.engines import samples_with_vllm

    if device.type != "cuda":
        return work
    total = torch.cuda.get_device_properties(device).total_memory
    share = int(total * settings.rollout.memory_share) if samples_with_vllm(settings, device) else 0
    return replace(work, device_bytes=total, engine_bytes=share)


def _readings(settings: SoloSettings, setup: GateSetup) -> tuple[list[list[Rows]], int]:
    """Rows of readings of some training tasks, and the number of validation tasks."""
    assert settings.corpus is not None
    train = setup.corpus.split("train")
    places = range(0, len(train), max(1, len(train) // _SAMPLED_TASKS))
    val_tasks = len(setup.val_tasks(settings.corpus.max_val_tasks))
    return [task_rows(train[place], setup.protocol, settings) for place in places], val_tasks


def _responses(settings: SoloSettings, setup: PromptSetup) -> tuple[list[list[Rows]], int]:
    """One row a training prompt, and the number of validation prompts."""
    response, share = settings.rollout.train.max_tokens, settings.rollout.group_size
    prompts = [row.prompt for row in setup.train.rows]
    return [[Rows(p.shared, len(p.ids) - p.shared, response, share)] for p in prompts], len(setup.val)


def task_rows(task: ReadingTask, protocol: GateProtocol, settings: SoloSettings) -> list[Rows]:
    """Rows of one reading to the end: a turn a chunk with a full memory, and the answer turn."""
    response, share = settings.rollout.train.max_tokens, settings.rollout.group_size
    prompts = [protocol.turn_prompt(task.question, chunk, "") for chunk in task.chunks]
    prompts.append(protocol.answer_prompt(task.question, ""))
    return [
        Rows(prompt.shared, len(prompt.ids) - prompt.shared + protocol.memory_tokens, response, share)
        for prompt in prompts
    ]


def workload(
    settings: SoloSettings, rows: Sequence[Rows], mean_turns: float, turns: int, val_tasks: int, done: int = 0
) -> Workload:
    """The work of a run whose rows are like ``rows``.

    Args:
        mean_turns: rows of one rollout.
        turns: of the longest rollout.
        val_tasks: prompts of a validation.
        done: steps that lie behind a run that goes on.
    """
    step, rollout, trainer = settings.step, settings.rollout, settings.trainer
    kl = settings.algorithm.use_kl_in_reward
    every, steps = trainer.test_freq, trainer.total_training_steps
    tested = steps // every - done // every if every > 0 else 0
    return Workload(
        mean=_rows(rows, lambda numbers: sum(numbers) / len(numbers)),
        longest=_rows(rows, max),
        rows=math.ceil(step.train_batch_size * rollout.group_size * mean_turns),
        rollouts=step.train_batch_size * rollout.group_size,
        turns=turns,
        val_rollouts=val_tasks * rollout.val_group_size,
        val_rows=math.ceil(val_tasks * rollout.val_group_size * mean_turns),
        mini_rows=math.ceil(step.ppo_mini_batch_size * rollout.group_size * mean_turns),
        max_rows=rollout.max_rows,
        micro_batch_tokens=step.micro_batch_tokens,
        forwards=(not step.fresh or kl) + (settings.loss.use_kl_loss or kl),
        backwards=step.ppo_epochs,
        steps=steps - done,
        validations=tested + (trainer.val_before_train and not done),
        entropy=settings.loss.entropy_coeff != 0,
    )


def _rows(rows: Sequence[Rows], of: Callable[[list[float]], float]) -> Rows:
    columns = ([row.prefix for row in rows], [row.suffix for row in rows], [row.response for row in rows])
    prefix, suffix, response = (of(column) for column in columns)
    return Rows(prefix, suffix, response, rows[0].share)


def model_shape(settings: ModelSettings) -> ModelShape:
    """Sizes of the actor's model folder, counted on the architecture without weights.

    Raises:
        Refused: ``config.json`` names no architecture that transformers knows.
    """
    return _shape(settings.path, settings.lora_rank, settings.target_modules, settings.dtype, "policy")


def _shape(path: Path, rank: int, targets: tuple[str, ...] | str, dtype: str, kind: _Kind) -> ModelShape:
    model, linears = _on_meta(path, kind)
    config = model.config
    heads = config.num_attention_heads
    adapted = [size for name, size in linears.items() if _adapted(name, targets)]
    return ModelShape(
        parameters=sum(value.numel() for value in model.parameters()),
        linear=sum(inputs * outputs for inputs, outputs in linears.values()),
        lora=rank * sum(inputs + outputs for inputs, outputs in adapted),
        rank=rank,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", heads),
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        dtype_bytes=_DTYPE_BYTES[dtype],
    )


def critic_of(settings: SoloSettings, mean_turns: float) -> Critic | None:
    """Sizes of the value model: a token classifier of one label on its own model; None but for gae."""
    chosen = settings.critic
    if chosen is None:
        return None
    shape = _shape(chosen.path, chosen.lora_rank, chosen.target_modules, chosen.dtype, "value")
    model, _ = _on_meta(chosen.path, "value")
    head = sum(value.numel() for value in model.score.parameters())
    trained = shape.lora + head if chosen.lora_rank else shape.parameters  # LoRA trains a copy of the head
    return Critic(
        shape=shape,
        parameters=shape.parameters + (trained if chosen.lora_rank else 0),
        trained=trained,
        mini_rows=math.ceil(chosen.ppo_mini_batch_size * settings.rollout.group_size * mean_turns),
        micro_batch_tokens=chosen.micro_batch_tokens,
        epochs=chosen.ppo_epochs,
    )


def _on_meta(path: Path, kind: _Kind) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The architecture without weights, and (in, out) of each linear layer but its head."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    factory = AutoModelForCausalLM if kind == "policy" else AutoModelForTokenClassification
    labels = {} if kind == "policy" else {"num_labels": 1}
    try:
        with torch.device("meta"):
            model = factory.from_config(AutoConfig.from_pretrained(path, local_files_only=True, **labels))
    except (ValueError, OSError) as error:
        raise Refused(f"{path}/config.json: got no {kind} model that transformers knows: {error}") from error
    head = model.get_output_embeddings() if kind == "policy" else model.score
    linears = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    return model, linears


def _adapted(name: str, targets: tuple[str, ...] | str) -> bool:
    from poimen_exp.adapters.lora_config import matches

    if targets == "all-linear":
        return True
    wanted = [targets] if isinstance(targets, str) else list(targets)
    return any(matches(name, target, targets) for target in wanted)


def measure_rates(device: torch.device, dtype: str) -> Rates:
    """Matrix rate, copy rate and launch time of this device, measured in some hundredths of a second."""
    import torch

    gpu = device.type == "cuda"
    side, length = (8192, 1 << 28) if gpu else (512, 1 << 23)
    square = torch.ones((side, side), dtype=getattr(torch, dtype), device=device)
    small = torch.ones((8, 8), dtype=square.dtype, device=device)
    source = torch.zeros(length, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return Rates(
        flops=2 * side**3 / _seconds(lambda: square @ square, device, 3),
        bytes=2 * length / _seconds(lambda: copy.copy_(source), device, 3),
        launch_s=_seconds(lambda: small @ small, device, 50),
    )


def _seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Of one call, the first left out."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    wait()
    begun = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return (time.perf_counter() - begun) / times
