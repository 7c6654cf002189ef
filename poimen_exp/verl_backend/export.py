"""From verl's checkpoint of an FSDP2 run to an adapter folder: verl writes no PEFT folder of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poimen_exp.adapters.export import export_state_dict
from poimen_exp.adapters.manifest import AdapterInfo
from poimen_exp.errors import RunFailed

if TYPE_CHECKING:
    from torch import Tensor


def export_checkpoint(actor: Path, folder: Path, info: AdapterInfo) -> Path:
    """Writes the adapter of the checkpoint folder ``actor`` to ``folder``, in the format of every other backend.

    Args:
        actor: ``global_step_N/actor``.
    """
    meta = json.loads((actor / "lora_train_meta.json").read_text())
    tensors = lora_tensors(actor)
    modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors})  # as PEFT spells out all-linear
    config = {"r": meta["r"], "lora_alpha": meta["lora_alpha"], "target_modules": modules, "bias": "none"}
    return export_state_dict(tensors, config, folder, info)


def lora_tensors(actor: Path) -> dict[str, Tensor]:
    """Full LoRA tensors of a checkpoint, in the type they were trained in, by parameter name.

    (verl's own merger converts to bfloat16, in which an adapter trained at a rate of 1e-6 loses its last steps.)

    Raises:
        RunFailed: a shard is missing, or a tensor is spread in a way that this cannot undo.
    """
    import torch

    world = int(json.loads((actor / "fsdp_config.json").read_text())["world_size"])
    shards: list[Mapping[str, Any]] = []
    for rank in range(world):
        path = actor / f"model_world_size_{world}_rank_{rank}.pt"
        if not path.is_file():
            raise RunFailed(f"{path}: missing; expected a shard of each of the {world} ranks (a shared file system)")
        state = torch.load(path, map_location="cpu", weights_only=False)  # DTensors; only verl's workers write it
        shards.append({name: value for name, value in state.items() if ".lora_" in name})
    return {name: _whole(name, [shard[name] for shard in shards]) for name in shards[0]}


def _whole(name: str, parts: list[Any]) -> Tensor:
    """One tensor of its parts on all ranks: plain ones are equal copies, FSDP's are cut along one dimension."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    first = parts[0]
    if not isinstance(first, DTensor):
        return torch.as_tensor(first)
    sharded = [place for place in first.placements if isinstance(place, Shard)]
    if not sharded:
        return first._local_tensor
    if len(sharded) > 1:
        raise RunFailed(f"{name}: cut along {len(sharded)} dimensions, expected one (FSDP)")
    dim = sharded[0].dim
    size, found, total = first.shape[dim], [], 0
    for part in parts:  # with replicas (HSDP) the same pieces come again: the first round is whole
        if total < size:
            found.append(part._local_tensor)
            total += part._local_tensor.shape[dim]
    whole = torch.cat(found, dim)
    if whole.shape != first.shape:
        raise RunFailed(f"{name}: shards give {tuple(whole.shape)}, expected {tuple(first.shape)}")
    return whole
