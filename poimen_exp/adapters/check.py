"""The mount check: what a vLLM server would refuse, or mount and get wrong, is refused here with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poimen_exp.adapters.export import KEY_PREFIX
from poimen_exp.adapters.hashing import base_model_sha256, sha256_of_file
from poimen_exp.adapters.lora_config import check_lora_config, matches, mountable_linears, read_adapter_config
from poimen_exp.adapters.manifest import CONFIG_NAME, MANIFEST_NAME, WEIGHTS_NAME, read_manifest
from poimen_exp.errors import Refused

if TYPE_CHECKING:
    from torch import Tensor

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def mount_check(folder: Path, base_model_dir: Path) -> None:
    """Passes only an adapter that vLLM mounts on this base model and that then does what it did in training.

    A folder without ``poimen.json`` (another program's adapter, for a warm start) passes without the hash checks.

    Raises:
        Refused: one message for each thing that can be wrong.
    """
    config = read_adapter_config(folder)
    linears = mountable_linears(base_model_dir)
    check_lora_config(config, linears, f"adapter {folder}")
    _check_no_added_tokens(folder)
    weights = _read_weights(folder)
    pairs = _pairs(weights, folder)
    _check_shapes(pairs, linears, int(config["r"]), folder)
    _check_complete(pairs, config, linears, folder)
    _check_values(weights, folder)
    if (folder / MANIFEST_NAME).exists():
        check_hashes(folder)
        _check_base(folder, base_model_dir)


def check_hashes(folder: Path) -> None:
    """Compares each file with the hash in ``poimen.json``."""
    for name, expected in read_manifest(folder).sha256.items():
        path = folder / name
        got = sha256_of_file(path) if path.is_file() else "no file"
        if got != expected:
            raise Refused(
                f"adapter {path}: sha256 is {got}, {MANIFEST_NAME} says {expected}; the file is not the one that was "
                "exported. Fetch or export the adapter again"
            )


def _check_no_added_tokens(folder: Path) -> None:
    for name in ("added_tokens.json", "tokenizer.json"):
        if (folder / name).exists():
            raise Refused(
                f"adapter {folder}: holds {name}; an adapter with tokens of its own cannot be mounted beside others"
            )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise Refused(f"adapter {folder}: no {WEIGHTS_NAME}")
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise Refused(f"adapter {path}: not a whole safetensors file ({error})") from error


def _pairs(weights: Mapping[str, Tensor], folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Module name -> (A [rank, in], B [out, rank])."""
    sides: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        match = _KEY.fullmatch(key)
        if match is not None:
            sides.setdefault(match["module"], {})[match["side"]] = value
        elif key.startswith(KEY_PREFIX):
            raise Refused(f"adapter {folder}: tensor {key} is no lora_A or lora_B of a linear layer; vLLM refuses it")
        else:
            raise Refused(
                f"adapter {folder}: tensor {key} does not start with {KEY_PREFIX!r}; the key prefix was changed by a "
                "wrapper, and no module would get it"
            )
    for module, found in sides.items():
        if len(found) != 2:
            raise Refused(f"adapter {folder}: {module} has lora_{next(iter(found))} only; expected the pair A and B")
    if not sides:
        raise Refused(f"adapter {folder}: {WEIGHTS_NAME} holds no tensors")
    return {module: (found["A"], found["B"]) for module, found in sides.items()}


def _check_shapes(
    pairs: Mapping[str, tuple[Tensor, Tensor]], linears: Mapping[str, tuple[int, int]], rank: int, folder: Path
) -> None:
    for module, (a, b) in pairs.items():
        if module not in linears:
            raise Refused(f"adapter {folder}: the base model has no linear layer {module} that vLLM can adapt")
        n_in, n_out = linears[module]
        if a.shape[0] != rank:
            raise Refused(f"adapter {folder}: {module} has rank {a.shape[0]}, {CONFIG_NAME} says r={rank}")
        if tuple(a.shape) != (rank, n_in) or tuple(b.shape) != (n_out, rank):
            raise Refused(
                f"adapter {folder}: {module} has A {list(a.shape)} and B {list(b.shape)}, the base model needs "
                f"[{rank}, {n_in}] and [{n_out}, {rank}]; was it trained on another model?"
            )


def _check_complete(
    pairs: Mapping[str, Any], config: Mapping[str, Any], linears: Mapping[str, tuple[int, int]], folder: Path
) -> None:
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return  # only part of the matching modules has an adapter, by intention
    targets = config["target_modules"]
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if wanted == ["all-linear"]:
        expected = set(linears)
    else:
        expected = {name for name in linears if any(matches(name, target, targets) for target in wanted)}
    missing = sorted(expected - pairs.keys())
    if missing:
        raise Refused(
            f"adapter {folder}: no tensors for {missing[0]} (of {len(missing)}), which target_modules names; part of "
            "the adapter was lost"
        )


def _check_values(weights: Mapping[str, Tensor], folder: Path) -> None:
    broken = [key for key, value in weights.items() if not bool(value.isfinite().all())]
    if broken:
        raise Refused(f"adapter {folder}: tensor {broken[0]} holds NaN or infinity")
    if not any(bool(value.any()) for key, value in weights.items() if ".lora_B." in key):
        raise Refused(
            f"adapter {folder}: every lora_B is zero, so the adapter changes nothing; it was never trained, or its "
            "weights were lost on the way"
        )


def _check_base(folder: Path, base_model_dir: Path) -> None:
    base = read_manifest(folder).base_model
    got = base_model_sha256(base_model_dir)
    if got != base.sha256:
        raise Refused(
            f"adapter {folder}: trained on {base.name} (sha256 {base.sha256}), mounted on {base_model_dir} (sha256 "
            f"{got}); expected the same weights"
        )
