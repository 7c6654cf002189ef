"""Everything that can be refused before Ray starts: a wrong run costs seconds then, not minutes of a cluster."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poimen_exp.errors import Refused

if TYPE_CHECKING:
    from omegaconf import DictConfig

_ROLLOUTS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""Rollout name to the module it needs."""


def preflight(cfg: DictConfig, machine: bool = True) -> None:
    """Checks a composed configuration, and this machine against it.

    Args:
        machine: False where the run is for another machine: packages, GPUs and Ray are not looked at.

    Raises:
        Refused: all findings at once, one a line: key, what it is, what was expected, what to do.
    """
    found = [*_configuration(cfg), *_model(cfg)]
    if machine:
        found += [*_installation(cfg), *_machine(cfg)]
    found = found or [*_adapter(cfg)]  # builds the model's architecture: a second of work
    if found:
        raise Refused("\n".join(found))


def check_tasks(cfg: DictConfig, tasks: dict[str, int]) -> None:
    """Refuses a corpus whose splits are too small for the batches.

    Args:
        tasks: number of tasks of ``train`` and ``val``.
    """
    wanted = cfg.data.train_batch_size
    if tasks["train"] < wanted:
        raise Refused(
            f"data.train_batch_size: got {wanted}, the corpus has {tasks['train']} training tasks; expected at most as "
            "many (verl drops an incomplete batch)"
        )
    if tasks["val"] == 0:
        raise Refused(
            f"corpus.path: {cfg.corpus.path} has no validation task; expected at least one: the run's objective"
        )


def validate(config: DictConfig) -> None:
    """verl's own checks, as refusals. Imports verl."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
    except (AssertionError, ValueError) as error:
        raise Refused(f"verl refuses the configuration: {error}") from error


def _configuration(cfg: DictConfig) -> Iterator[str]:
    wanted: list[tuple[str, tuple[Any, ...], str]] = [
        ("trainer.use_v1", (True,), "the gates run on verl's V1 trainer"),
        ("trainer.v1.trainer_mode", ("sync",), "a stale policy breaks the comparison with the paper"),
        ("algorithm.adv_estimator", ("poimen_gates",), "the two-baseline advantage is this backend's estimator"),
        ("algorithm.use_kl_in_reward", (False,), "the advantages come from the gates' rewards; use actor.use_kl_loss"),
        ("algorithm.filter_groups.enable", (False,), "groups without signal are counted, not filtered"),
        ("critic.enable", (False,), "the advantages need no critic"),
        ("distillation.enabled", (False,), "there is no teacher"),
        ("reward.reward_model.enable", (False,), "rewards are the gates' own"),
        ("trainer.val_only", (False,), "to validate only: poimen eval"),
        ("actor_rollout_ref.hybrid_engine", (True,), "the synchronous trainer shares its GPUs with the sampler"),
        ("actor_rollout_ref.actor.loss_agg_mode", ("token-mean",), "mini-batches hold unequal numbers of rows"),
        ("trainer.v1.sampler.custom_sampler.path", (None,), "this backend fills it"),
        ("data.custom_cls.path", (None,), "the corpus is read by this backend: corpus.path"),
        ("data.gen_batch_size", (None,), "a step's prompts are generated together"),
        ("gates.warm_start.steps", (0,), "supervised steps run in solo: train with backend=solo and start from its "
         "adapter with actor_rollout_ref.model.lora_adapter_path=DIR"),
    ]  # fmt: skip
    for key, allowed, why in wanted:
        got = _value(cfg, key)
        if got not in allowed:
            yield f"{key}: got {got}, expected {' or '.join(map(str, allowed))} under backend=verl: {why}"
    yield from _lora(cfg)
    yield from _batches(cfg)
    yield from _sampling(cfg)


def _sampling(cfg: DictConfig) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.temperature <= 0:
        yield (
            f"actor_rollout_ref.rollout.temperature: got {rollout.temperature}, expected above 0: the rollouts of a "
            "group must differ, and log-probs are taken at it"
        )
    if not rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature > 0:
        yield (
            f"actor_rollout_ref.rollout.val_kwargs.do_sample: got False at temperature {rollout.val_kwargs.temperature}"
            ", expected True: verl's V1 trainer samples by temperature alone; for greedy validation set "
            "val_kwargs.temperature=0"
        )


def _lora(cfg: DictConfig) -> Iterator[str]:
    model = cfg.actor_rollout_ref.model
    if model.lora.rank > 0:
        yield (
            f"actor_rollout_ref.model.lora.rank: got {model.lora.rank}, expected 0: that is Megatron's; set "
            "actor_rollout_ref.model.lora_rank"
        )
    if model.lora_rank <= 0:
        yield (
            f"actor_rollout_ref.model.lora_rank: got {model.lora_rank}, expected at least 1: a run ends with an "
            "adapter (lora=rank16)"
        )
    if cfg.actor_rollout_ref.actor.strategy != "fsdp2":
        yield (
            f"actor_rollout_ref.actor.strategy: got {cfg.actor_rollout_ref.actor.strategy}, expected fsdp2: under fsdp "
            "on one GPU verl 0.9.1 sends the sampler an empty adapter"
        )
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.load_format == "dummy" and rollout.name == "vllm":
        yield (
            "actor_rollout_ref.rollout.load_format: got dummy, expected safetensors: a LoRA run sends the sampler the "
            "adapter only"
        )


def _batches(cfg: DictConfig) -> Iterator[str]:
    batch, mini = cfg.data.train_batch_size, cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini <= 0 or batch % mini:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size: got {mini}, expected a divisor of data.train_batch_size "
            f"({batch}): an optimizer step takes whole groups"
        )
    if cfg.actor_rollout_ref.rollout.n < 2:
        yield (
            f"actor_rollout_ref.rollout.n: got {cfg.actor_rollout_ref.rollout.n}, expected at least 2: alone in its "
            "group, every advantage is 0"
        )
    if cfg.trainer.total_training_steps is None or cfg.trainer.total_training_steps < 1:
        yield f"trainer.total_training_steps: got {cfg.trainer.total_training_steps}, expected at least 1"
    if cfg.trainer.test_freq < 1:
        yield (
            f"trainer.test_freq: got {cfg.trainer.test_freq}, expected at least 1: the run's objective is measured by "
            "its validations"
        )


def _installation(cfg: DictConfig) -> Iterator[str]:
    name = cfg.actor_rollout_ref.rollout.name
    if not _installed("transfer_queue"):
        yield "TransferQueue: not installed, verl's V1 trainer needs it: pip install TransferQueue==0.1.11"
    if cfg.trainer.device == "cpu":
        if name != "transformers":
            yield (f"actor_rollout_ref.rollout.name: got {name}, expected transformers with trainer.device=cpu")
        return
    module = _ROLLOUTS.get(name)
    if module is None:
        yield f"actor_rollout_ref.rollout.name: got {name}, expected one of {', '.join(_ROLLOUTS)}"
    elif not _installed(module):
        hint = "uv sync --extra vllm" if name == "vllm" else f"install {name}"
        yield f"actor_rollout_ref.rollout.name: got {name}, which is not installed here; expected it: {hint}"


def _model(cfg: DictConfig) -> Iterator[str]:
    folder = Path(cfg.actor_rollout_ref.model.path)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            yield (
                f"actor_rollout_ref.model.path: {folder} holds no {name}; expected a model folder on this machine "
                "(and under the same path on every node)"
            )
            return
    shards = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    heads = json.loads((folder / "config.json").read_bytes()).get("num_attention_heads", shards)
    if heads % shards:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size: got {shards}, expected a divisor of the model's "
            f"{heads} attention heads: vLLM gives every GPU of a server equally many"
        )


def _adapter(cfg: DictConfig) -> Iterator[str]:
    """What could be trained but not served, and an adapter to start from that does not fit the model."""
    from poimen_exp.adapters.lora_config import read_adapter_config
    from poimen_exp.adapters.preflight import check_before_training

    model = cfg.actor_rollout_ref.model
    start = None if model.lora_adapter_path is None else Path(model.lora_adapter_path)
    targets = model.target_modules if isinstance(model.target_modules, str) else list(model.target_modules)
    try:
        check_before_training(Path(model.path), model.lora_rank, model.lora_alpha, targets, start)
    except Refused as error:
        yield str(error) if start is None else f"actor_rollout_ref.model.lora_adapter_path: {error}"
        return
    if start is not None:
        config = read_adapter_config(start)
        for key, got in (("lora_rank", config["r"]), ("lora_alpha", config["lora_alpha"])):
            if got != model[key]:
                yield (
                    f"actor_rollout_ref.model.{key}: got {model[key]}, expected {got}, that of the adapter which the "
                    f"run starts from ({start})"
                )


def _machine(cfg: DictConfig) -> Iterator[str]:
    per_node, nodes = cfg.trainer.n_gpus_per_node, cfg.trainer.nnodes
    rollout = cfg.actor_rollout_ref.rollout
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    if (per_node * nodes) % replica:
        yield (
            f"actor_rollout_ref.rollout: a server takes {replica} GPUs (tensor x data x pipeline parallel), expected a "
            f"divisor of trainer.nnodes x trainer.n_gpus_per_node = {per_node * nodes}"
        )
    if nodes > 1 and "RAY_ADDRESS" not in os.environ:
        yield (
            f"trainer.nnodes: got {nodes} without a Ray cluster; expected RAY_ADDRESS to name one (docs/scale.md), or "
            "trainer.nnodes=1"
        )
    if cfg.trainer.device == "cpu" or "RAY_ADDRESS" in os.environ:
        return  # Ray counts the cluster's
    import torch

    here = torch.cuda.device_count()
    if cfg.trainer.device == "cuda" and here < per_node:
        yield (
            f"trainer.n_gpus_per_node: got {per_node}, this machine shows {here} GPUs; set it to {max(here, 1)} or "
            "check CUDA_VISIBLE_DEVICES"
            + ("" if here else "; without a GPU: backend=solo, or trainer.device=cpu for a dry run")
        )


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _value(cfg: Any, key: str) -> Any:
    for name in key.split("."):
        cfg = cfg[name]
    return cfg
