"""What a solo run needs, as typed values. ``solo.plan`` fills these from the composed configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from poimen_exp.gates.protocol import Layout, Wording
from poimen_exp.gates.types import Sampling


@dataclass(frozen=True)
class CorpusSettings:
    path: Path
    chunk_tokens: int
    max_chunks: int
    min_kappa: float
    allow_unmeasured: bool
    on_too_long: Literal["refuse", "drop"]
    split_seed: int
    val_fraction: float
    test_fraction: float
    max_val_tasks: int | None
    """Validation reads at most this many tasks (the first by hash of their id); None for all."""


@dataclass(frozen=True)
class GateSettings:
    layout: Layout
    wording: Wording
    memory_tokens: int
    on_unparsed: Literal["zero_trajectory", "zero_format"]
    matcher: Literal["exact", "contains", "f1"]
    turn_baseline: Literal["group_step", "batch_step"]
    warm_start_steps: int
    """Supervised steps on constructed turns before RL; 0 for none."""
    warm_start_lr: float
    warm_start_batch: int


@dataclass(frozen=True)
class ModelSettings:
    path: Path
    lora_rank: int
    lora_alpha: int
    target_modules: tuple[str, ...] | str
    dtype: Literal["float32", "bfloat16"]
    """Of the frozen base weights and of the forward passes; LoRA weights and optimizer state are always float32."""
    attn_implementation: str
    adapter: Path | None
    """Warm start from a PEFT folder; None for a fresh adapter."""


@dataclass(frozen=True)
class RolloutSettings:
    train: Sampling
    val: Sampling
    group_size: int
    """Rollouts a prompt (verl: rollout.n)."""
    val_group_size: int
    max_prompt_length: int
    max_rows: int
    """Rows generated at once (verl: rollout.max_num_seqs)."""
    max_failed: float


@dataclass(frozen=True)
class LossSettings:
    """Field names are verl's (actor config)."""

    clip_ratio: float
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    loss_agg_mode: str
    entropy_coeff: float
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: str


@dataclass(frozen=True)
class OptimSettings:
    """Field names are verl's (FSDPOptimizerConfig)."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    lr_warmup_steps: int
    lr_scheduler_type: Literal["constant", "cosine"]
    min_lr_ratio: float
    grad_clip: float
    total_training_steps: int


@dataclass(frozen=True)
class StepSettings:
    train_batch_size: int
    """Prompts a step."""
    ppo_mini_batch_size: int
    """Prompts an optimizer step."""
    ppo_epochs: int
    micro_batch_tokens: int
    """Padded tokens a forward (verl: ppo_max_token_len_per_gpu)."""
    shuffle: bool


@dataclass(frozen=True)
class TrainerSettings:
    total_training_steps: int
    test_freq: int
    save_freq: int
    val_before_train: bool
    max_ckpt_to_keep: int | None
    patience: int | None
    """Validations without a better ``val/reward/total`` before the run stops; None never stops."""
    min_delta: float
    on_collapse: Literal["warn", "stop"]


@dataclass(frozen=True)
class SoloSettings:
    """Everything a solo run reads."""

    alpha: float
    seed: int
    device: Literal["auto", "cpu", "cuda"]
    corpus: CorpusSettings
    gates: GateSettings
    model: ModelSettings
    rollout: RolloutSettings
    loss: LossSettings
    optim: OptimSettings
    step: StepSettings
    trainer: TrainerSettings
