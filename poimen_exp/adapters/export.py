"""From a trained model to an adapter folder: PEFT's two files and ``poimen.json``."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poimen_exp.adapters.files import folder_written_aside
from poimen_exp.adapters.hashing import base_model_sha256, sha256_of_file
from poimen_exp.adapters.manifest import (
    CONFIG_NAME,
    MANIFEST_NAME,
    SCHEMA,
    WEIGHTS_NAME,
    AdapterInfo,
    BaseModel,
    Manifest,
)
from poimen_exp.errors import Refused, RunFailed

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch import Tensor

KEY_PREFIX = "base_model.model."
# FSDP and torch.compile wrap modules; neither name belongs into a file.
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_orig_mod\.|_checkpoint_wrapped_module\.|^module\.")
_ADAPTER_NAME = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$")


def export_adapter(
    model: PeftModel, folder: Path, info: AdapterInfo, adapter_name: str = "default", name: str | None = None
) -> Path:
    """Writes the named adapter of ``model`` to ``folder``, whole or not at all, and returns ``folder``.

    Raises:
        RunFailed: a weight is not finite, or what was written does not read back bit for bit.
    """
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    return export_state_dict(tensors, model.peft_config[adapter_name], folder, info, name)


def export_state_dict(
    tensors: Mapping[str, Tensor],
    lora_config: LoraConfig | Mapping[str, Any],
    folder: Path,
    info: AdapterInfo,
    name: str | None = None,
) -> Path:
    """As ``export_adapter``, from gathered LoRA tensors (an FSDP checkpoint) and their configuration.

    Args:
        tensors: full tensors by parameter name; wrapper names and the adapter's name inside are removed, a missing
            ``base_model.model.`` is added.
        lora_config: a ``LoraConfig`` or the values of one, also as OmegaConf containers.
    """
    weights = {_canonical_key(key): value.detach().cpu().contiguous() for key, value in tensors.items()}
    _require_finite(weights)
    config = _plain_config(lora_config, info.base_model)
    with folder_written_aside(folder) as aside:
        _write_weights(aside / WEIGHTS_NAME, weights)
        (aside / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        manifest = _manifest(aside, weights, config, info, name)
        (aside / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return folder


def max_rank(weights: Mapping[str, Any]) -> int:
    """Largest rank among the ``lora_A`` tensors ([rank, in]); 0 where there are none."""
    return max((int(value.shape[0]) for key, value in weights.items() if ".lora_A." in key), default=0)


def _canonical_key(key: str) -> str:
    key = _ADAPTER_NAME.sub(r".\1.weight", _WRAPPERS.sub("", key))
    return key if key.startswith(KEY_PREFIX) else KEY_PREFIX + key


def _require_finite(weights: Mapping[str, Tensor]) -> None:
    if not weights:
        raise RunFailed("adapter export: no LoRA tensors; expected at least one lora_A and lora_B pair")
    broken = [key for key, value in weights.items() if not bool(value.isfinite().all())]
    if broken:
        raise RunFailed(f"adapter export: {broken[0]} (of {len(broken)}) holds NaN or infinity; nothing was written")


def _write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    # Clones: safetensors refuses tensors that share memory (views of one flat FSDP parameter do).
    save_file({key: value.clone() for key, value in weights.items()}, path, metadata={"format": "pt"})
    written = load_file(path)
    wrong = [key for key in weights if key not in written or not torch.equal(weights[key], written[key])]
    if wrong or len(written) != len(weights):
        raise RunFailed(f"adapter export: {path.name} does not read back as written (first: {wrong[:1]})")


def _plain_config(lora_config: LoraConfig | Mapping[str, Any], base_model: Path) -> dict[str, Any]:
    values = lora_config if isinstance(lora_config, Mapping) else lora_config.to_dict()
    config: dict[str, Any] = {str(key): _plain(value) for key, value in values.items()}
    config |= {"base_model_name_or_path": str(base_model.resolve()), "inference_mode": True}
    config |= {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    missing = [key for key in ("r", "lora_alpha", "target_modules") if config.get(key) is None]
    if missing:
        raise Refused(f"adapter export: the LoRA configuration has no {', '.join(missing)}")
    return config


def _plain(value: Any) -> Any:
    """JSON's own types only: PEFT keeps sets and enums, a composed configuration ListConfig and DictConfig."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping) or type(value).__name__ == "DictConfig":
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(entry) for entry in value)
    if isinstance(value, list | tuple) or type(value).__name__ == "ListConfig":
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)  # dtypes


def _manifest(
    folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], info: AdapterInfo, name: str | None
) -> Manifest:
    targets = sorted({key.removesuffix(".weight").split(".lora_")[0].rsplit(".", 1)[-1] for key in weights})
    base = BaseModel(info.base_model.resolve().name, str(info.base_model.resolve()), base_model_sha256(info.base_model))
    return Manifest(
        name=name,
        version=None,
        base_model=base,
        dtype=info.dtype,
        lora_rank=max_rank(weights),
        lora_alpha=config["lora_alpha"],
        target_modules=tuple(targets),
        layout=info.layout,
        wording=info.wording,
        memory_tokens=info.memory_tokens,
        chunk_tokens=info.chunk_tokens,
        response_tokens=info.response_tokens,
        corpus_id=info.corpus_id,
        corpus_sha256=info.corpus_sha256,
        label_status=info.label_status,
        run_id=info.run_id,
        step=info.step,
        metrics=_finite(info.metrics),
        sha256={file: sha256_of_file(folder / file) for file in (CONFIG_NAME, WEIGHTS_NAME)},
        protocol=info.protocol,
        schema=SCHEMA,
    )


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    broken = [key for key, value in metrics.items() if not math.isfinite(value)]
    if broken:
        value = metrics[broken[0]]
        raise RunFailed(f"adapter export: metric {broken[0]} is {value}; a metric without a value is left out")
    return {key: float(value) for key, value in metrics.items()}
