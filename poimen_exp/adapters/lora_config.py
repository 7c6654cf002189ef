"""What a LoRA configuration must be for vLLM 0.24 to mount the adapter and apply it as it was trained."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poimen_exp.adapters.manifest import CONFIG_NAME
from poimen_exp.errors import Refused

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.24 takes for ``--max-lora-rank``."""

# Features of PEFT that vLLM 0.24 drops without a word: the mounted adapter would be another function.
_UNSUPPORTED = {
    "use_qalora": "QALoRA",
    "layer_replication": "layer replication",
    "target_parameters": "LoRA on bare parameters",
    "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "fan_in_fan_out": "fan_in_fan_out weights",
}


def check_lora_config(config: Mapping[str, Any], linears: Mapping[str, tuple[int, int]], where: str) -> None:
    """The part of the mount check that needs no weights: trainers call it before they train.

    Args:
        config: values of a ``LoraConfig``; keys left out have PEFT's defaults.
        linears: ``mountable_linears`` of the base model.
        where: what the messages start with.
    """
    if config.get("peft_type", "LORA") != "LORA":
        raise Refused(f"{where}: peft_type is {config['peft_type']!r}; vLLM mounts LORA only")
    if config.get("task_type", "CAUSAL_LM") != "CAUSAL_LM":
        raise Refused(f"{where}: task_type is {config['task_type']!r}, expected CAUSAL_LM")
    if config.get("use_dora"):
        raise Refused(f"{where}: use_dora is set; vLLM does not support DoRA. Train with use_dora=false")
    if config.get("modules_to_save"):
        raise Refused(
            f"{where}: modules_to_save is {config['modules_to_save']}; vLLM mounts low-rank pairs only, whole modules "
            "would be missing. Leave modules_to_save out"
        )
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise Refused(f"{where}: the adapter trains biases; vLLM supports bias='none' and lora_bias=false only")
    if config.get("trainable_token_indices"):
        raise Refused(f"{where}: trainable_token_indices is set; vLLM cannot mount added or trained tokens")
    for key, feature in _UNSUPPORTED.items():
        if config.get(key):
            raise Refused(f"{where}: {key} is set; vLLM does not apply {feature} and would serve another function")
    _check_rank(config, where)
    _check_targets(config, linears, where)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json`` as plain values."""
    path = folder / CONFIG_NAME
    if not folder.is_dir():
        raise Refused(f"adapter {folder}: no such folder")
    if not path.is_file():
        raise Refused(f"adapter {folder}: no {CONFIG_NAME}; expected a PEFT adapter folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refused(f"adapter {path}: not plain JSON ({error})") from error
    missing = [key for key in ("r", "lora_alpha", "target_modules") if not config.get(key)]
    if missing:
        raise Refused(f"adapter {path}: {', '.join(missing)} missing; vLLM needs all of r, lora_alpha, target_modules")
    return dict(config)


def mountable_linears(base_model_dir: Path) -> dict[str, tuple[int, int]]:
    """Name and (in, out) features of each linear layer that vLLM can put an adapter on: all but the output head.

    Builds the architecture without weights, whatever the model's size.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (base_model_dir / "config.json").is_file():
        raise Refused(f"base model {base_model_dir}: no config.json there; expected a model folder")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_model_dir))
    head = model.get_output_embeddings()
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }


def vllm_rank(rank: int) -> int:
    """Smallest ``--max-lora-rank`` that vLLM 0.24 takes and that holds ``rank``."""
    for allowed in VLLM_RANKS:
        if rank <= allowed:
            return allowed
    raise Refused(f"LoRA rank {rank}: vLLM serves at most {VLLM_RANKS[-1]}")


def _check_rank(config: Mapping[str, Any], where: str) -> None:
    rank, alpha = config["r"], config["lora_alpha"]
    ranks = {"r": rank, **{f"rank_pattern[{key}]": value for key, value in (config.get("rank_pattern") or {}).items()}}
    for name, value in ranks.items():
        if not isinstance(value, int) or not 1 <= value <= VLLM_RANKS[-1]:
            raise Refused(f"{where}: {name} is {value!r}; vLLM serves ranks from 1 to {VLLM_RANKS[-1]}")
    other_ranks = [name for name, value in ranks.items() if value != rank]
    other_alphas = [key for key, value in (config.get("alpha_pattern") or {}).items() if value != alpha]
    if other_ranks or other_alphas:
        patterns = other_ranks + [f"alpha_pattern[{key}]" for key in other_alphas]
        raise Refused(
            f"{where}: {patterns[0]} differs from r={rank}, lora_alpha={alpha}; vLLM scales every module by the "
            "global lora_alpha / r and would apply this one at another strength. Use one rank and alpha"
        )


def _check_targets(config: Mapping[str, Any], linears: Mapping[str, tuple[int, int]], where: str) -> None:
    targets = config["target_modules"]
    if targets == "all-linear":
        return
    wanted = [targets] if isinstance(targets, str) else list(targets)
    unknown = [target for target in wanted if not any(matches(name, target, targets) for name in linears)]
    if unknown:
        known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linears}))
        raise Refused(
            f"{where}: target module {unknown[0]!r} is none of the base model's linear layers that vLLM can put an "
            f"adapter on; they are {known}"
        )


def matches(name: str, target: str, targets: Any) -> bool:
    """PEFT's rule: one string is a pattern for the whole name, a list holds names or ends of names."""
    if isinstance(targets, str):
        return re.fullmatch(target, name) is not None
    return name == target or name.endswith("." + target)
