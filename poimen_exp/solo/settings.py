"""What a solo run needs, as typed values. ``solo.plan`` fills these from the composed configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from poimen_exp.gates.protocol import Layout, Wording
from poimen_exp.gates.types import Sampling

Estimator = Literal["poimen_gates", "gae", "grpo", "rloo", "reinforce_plus_plus"]
"""``algorithm.adv_estimator``: ``poimen_gates`` trains the gates, the others single-turn prompts."""

AdapterWeights = Literal["best", "last"]
"""Whose weights a run leaves as its adapter: the best validation's or the last step's."""
ProviderName = Literal["exact_answer", "target_length", "verl"]


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
class PromptSettings:
    """Single-turn prompts from Parquet; names are verl's (``data.*``)."""

    train_files: tuple[Path, ...]
    val_files: tuple[Path, ...]
    prompt_key: str
    train_max_samples: int
    val_max_samples: int
    """-1 for all rows."""
    filter_overlong_prompts: bool
    """Whether a prompt longer than ``max_prompt_length`` is dropped; it is refused where not."""


@dataclass(frozen=True)
class RewardSettings:
    """Where scores of prompts come from: at most one of the three is named."""

    provider: ProviderName | None = None
    custom_path: Path | None = None
    """Python file with the user's function (verl: reward.custom_reward_function.path)."""
    custom_name: str = "compute_score"
    model_path: Path | None = None
    """Folder of a sequence classifier (verl: reward.reward_model.model_path)."""
    model_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    model_batch_tokens: int = 8192


@dataclass(frozen=True)
class AlgorithmSettings:
    """Field names are verl's (``algorithm.*``)."""

    adv_estimator: Estimator
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_coef: float = 0.0


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
    engine: Literal["vllm", "sglang", "hf"] = "hf"
    """verl: rollout.name. Only vllm is more than a name: in this process on a GPU, where it is installed."""
    memory_share: float = 0.5
    """Of the device's memory that vLLM may take (verl: rollout.gpu_memory_utilization)."""
    enforce_eager: bool = False


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
    loss_scale_factor: int | None = None
    """Of ``seq-mean-token-sum-norm``: what the sum over a sequence is divided by."""


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
class CriticSettings:
    """The value model of gae. Names are verl's (``critic.*``)."""

    path: Path
    lora_rank: int
    """0 trains every weight, in float32."""
    dtype: Literal["float32", "bfloat16"]
    """Of the forward passes; trained weights and optimizer state are always float32."""
    attn_implementation: str
    optim: OptimSettings
    ppo_mini_batch_size: int
    """Prompts an optimizer step."""
    ppo_epochs: int
    micro_batch_tokens: int
    """Padded tokens a forward (verl: critic.ppo_max_token_len_per_gpu)."""
    cliprange_value: float
    loss_agg_mode: str
    loss_scale_factor: int | None = None
    lora_alpha: int = 16
    target_modules: tuple[str, ...] | str = "all-linear"


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

    @property
    def fresh(self) -> bool:
        """Whether a rollout batch makes one optimizer step, by the policy that sampled it; else the rest are replay."""
        return self.ppo_mini_batch_size == self.train_batch_size and self.ppo_epochs == 1


@dataclass(frozen=True)
class OffloadSettings:
    """What lies in main memory outside of the phases that need it. On a CPU everything does, and nothing moves."""

    actor: bool = False
    """Weights that are trained, and with them those that sample, their slots and what was recorded."""
    actor_optimizer: bool = False
    reference: bool = False
    """The reference's adapter weights; its base is the actor's."""
    critic: bool = False
    critic_optimizer: bool = False


NO_OFFLOAD, FULL_OFFLOAD = OffloadSettings(), OffloadSettings(True, True, True, True, True)


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
    adapter_weights: AdapterWeights
    critic_warmup: int = 0
    """Steps before this one train the critic alone."""
    resume_from: Path | None = None
    """A checkpoint folder of another run that this one begins with (verl: resume_mode=resume_path)."""


@dataclass(frozen=True)
class SoloSettings:
    """Everything a solo run reads.

    Attributes:
        corpus: of the gates; None where prompts are trained on.
        prompts: None where the gates are trained.
        reference: PEFT folder of the policy that KL is measured against; None for where the run began (gates) or the
            frozen base (prompts, as verl does).
        critic: None but for gae.
    """

    alpha: float
    seed: int
    device: Literal["auto", "cpu", "cuda"]
    gates: GateSettings
    model: ModelSettings
    rollout: RolloutSettings
    algorithm: AlgorithmSettings
    loss: LossSettings
    optim: OptimSettings
    step: StepSettings
    trainer: TrainerSettings
    corpus: CorpusSettings | None = None
    prompts: PromptSettings | None = None
    reward: RewardSettings = RewardSettings()
    reference: Path | None = None
    critic: CriticSettings | None = None
    offload: OffloadSettings = NO_OFFLOAD
