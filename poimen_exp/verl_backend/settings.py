"""What the verl backend itself reads of the composed configuration, as typed values. verl reads the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from poimen_exp.gates.scoring import TurnBaseline
from poimen_exp.gates.types import Sampling
from poimen_exp.solo.settings import CorpusSettings, GateSettings, LossSettings

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class ReaderSettings:
    """What every process that reads tasks needs: the driver and verl's agent-loop workers."""

    model_path: Path
    corpus: CorpusSettings
    gates: GateSettings
    max_prompt_length: int
    turn_timeout_s: float


@dataclass(frozen=True)
class StopSettings:
    """When a run ends before its last step."""

    patience: int | None
    min_delta: float
    on_collapse: Literal["warn", "stop"]


@dataclass(frozen=True)
class VerlSettings:
    """What the driver needs."""

    alpha: float
    turn_baseline: TurnBaseline
    reader: ReaderSettings
    group_size: int
    val_group_size: int
    train_batch_size: int
    mini_batches: int
    """Optimizer steps of one pass over a rollout batch."""
    rows_multiple: int
    """Fixed micro-batch rows a rank (least common multiple of update and log-prob); 1 where verl packs by tokens."""
    max_failed: float
    stall_timeout_s: float
    stop: StopSettings
    lora_rank: int
    device: str


def corpus_settings(cfg: DictConfig) -> CorpusSettings:
    """The keys under ``corpus``."""
    corpus = cfg.corpus
    return CorpusSettings(
        path=Path(corpus.path),
        chunk_tokens=corpus.chunk_tokens,
        max_chunks=corpus.max_chunks,
        min_kappa=corpus.min_kappa,
        allow_unmeasured=corpus.allow_unmeasured,
        on_too_long=corpus.on_too_long,
        split_seed=corpus.split_seed,
        val_fraction=corpus.val_fraction,
        test_fraction=corpus.test_fraction,
        max_val_tasks=corpus.max_val_tasks,
    )


def gate_settings(cfg: DictConfig) -> GateSettings:
    """The keys under ``gates`` and ``advantage``."""
    gates = cfg.gates
    return GateSettings(
        layout=gates.layout,
        wording=gates.wording,
        memory_tokens=gates.memory_tokens,
        on_unparsed=gates.on_unparsed,
        matcher=gates.matcher,
        turn_baseline=cfg.advantage.turn_baseline,
        warm_start_steps=gates.warm_start.steps,
        warm_start_lr=gates.warm_start.lr,
        warm_start_batch=gates.warm_start.batch,
    )


def loss_settings(cfg: DictConfig) -> LossSettings:
    """verl's actor loss as solo has it: what the gate check takes its optimizer step with."""
    actor = cfg.actor_rollout_ref.actor
    return LossSettings(
        clip_ratio=actor.clip_ratio,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        entropy_coeff=actor.entropy_coeff,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
    )


def reader_settings(cfg: DictConfig) -> ReaderSettings:
    """Part of ``settings_of`` that workers need too."""
    return ReaderSettings(
        model_path=Path(cfg.actor_rollout_ref.model.path),
        corpus=corpus_settings(cfg),
        gates=gate_settings(cfg),
        max_prompt_length=cfg.data.max_prompt_length,
        turn_timeout_s=float(cfg.rollout.turn_timeout_s),
    )


def settings_of(cfg: DictConfig) -> VerlSettings:
    """Typed settings of a composed configuration whose divisibility ``preflight`` has checked."""
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    return VerlSettings(
        alpha=float(cfg.alpha),
        turn_baseline=cfg.advantage.turn_baseline,
        reader=reader_settings(cfg),
        group_size=rollout.n,
        val_group_size=rollout.val_kwargs.n,
        train_batch_size=cfg.data.train_batch_size,
        mini_batches=cfg.data.train_batch_size // actor.ppo_mini_batch_size,
        rows_multiple=_rows_multiple(cfg),
        max_failed=float(cfg.rollout.max_failed),
        stall_timeout_s=float(cfg.rollout.stall_timeout_s),
        stop=StopSettings(cfg.stop.patience, float(cfg.stop.min_delta), cfg.stop.on_collapse),
        lora_rank=cfg.actor_rollout_ref.model.lora_rank,
        device=cfg.trainer.device,
    )


def _rows_multiple(cfg: DictConfig) -> int:
    import math

    actor, ref, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref, cfg.actor_rollout_ref.rollout
    if actor.use_dynamic_bsz:
        return 1
    rows = [actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu]
    if actor.use_kl_loss:
        rows.append(ref.log_prob_micro_batch_size_per_gpu)
    return math.lcm(*(int(count) for count in rows if count))


def sampling(params: dict[str, object], max_tokens: int) -> Sampling:
    """verl's sampling parameters of a rollout (training or ``val_kwargs``) as the gates have them."""
    return Sampling(
        temperature=float(str(params["temperature"])),
        top_p=float(str(params["top_p"])),
        top_k=int(str(params["top_k"])),
        max_tokens=max_tokens,
    )
