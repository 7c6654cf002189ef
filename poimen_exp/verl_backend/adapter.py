"""The adapter of a verl run: one of its checkpoints, in the format of every other backend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from poimen_exp.adapters.manifest import AdapterInfo, Dtype
from poimen_exp.solo.checkpoint import Progress
from poimen_exp.tracking.metrics_log import by_step, read_metrics
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.tracker import say_on_stderr
from poimen_exp.verl_backend.export import export_checkpoint
from poimen_exp.verl_backend.reader import Reader
from poimen_exp.verl_backend.settings import VerlSettings

if TYPE_CHECKING:
    from omegaconf import DictConfig


def write_adapter(
    cfg: DictConfig, settings: VerlSettings, reader: Reader, progress: Progress, folder: RunFolder
) -> Path:
    """Exports the weights of ``adapter_step`` to ``adapter/``."""
    weights = cfg.adapter.weights
    step = progress.adapter_step(cfg.actor_rollout_ref.model.lora_adapter_path is None, weights)
    if weights == "best" and progress.best_step == 0 and step > 0:
        say_on_stderr(f"no validation was better than the base model's (step 0): adapter/ is that of step {step}")
    line = by_step(read_metrics(folder.metrics).lines).get(step)
    gates, corpus = settings.reader.gates, reader.corpus
    info = AdapterInfo(
        base_model=settings.reader.model_path,
        dtype=_dtype(cfg),
        layout=gates.layout,
        wording=gates.wording,
        memory_tokens=gates.memory_tokens,
        chunk_tokens=settings.reader.corpus.chunk_tokens,
        response_tokens=cfg.data.max_response_length,
        corpus_id=corpus.corpus_id,
        corpus_sha256=corpus.sha256,
        label_status=corpus.label_status,
        run_id=folder.run_id,
        step=step,
        metrics={} if line is None else {k: v for k, v in line.metrics.items() if k.startswith("val/")},
    )
    return export_checkpoint(folder.checkpoint(step) / "actor", folder.adapter, info)


def _dtype(cfg: DictConfig) -> Dtype:
    """Type of the forward passes in training: verl computes in bfloat16 unless ``mixed_precision`` says otherwise."""
    mixed = cfg.actor_rollout_ref.actor.fsdp_config.get("mixed_precision")
    return "float32" if mixed is not None and mixed.param_dtype in ("fp32", "float32") else "bfloat16"
