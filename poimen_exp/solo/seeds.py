"""Random streams that depend on where a run is, not on how it got there: resuming needs no generator state."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def stream_seed(seed: int, *place: str | int) -> int:
    """A 63-bit seed for one named place of a run, such as ``(seed, "rollout", step)``."""
    name = "/".join(str(part) for part in (seed, *place))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def stream(seed: int, *place: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded for one named place of a run."""
    return torch.Generator(device=device).manual_seed(stream_seed(seed, *place))


def seed_everything(seed: int) -> None:
    """Seeds the process's own generators: LoRA's first weights come from torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Order of the training prompts in an epoch: what verl's RandomSampler draws for its ``epoch``-th pass."""
    if not shuffle:
        return list(range(size))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(size, generator=generator)
    for _ in range(epoch):
        order = torch.randperm(size, generator=generator)
    return [int(place) for place in order]


def prompts_of_step(size: int, batch: int, seed: int, step: int, shuffle: bool) -> list[int]:
    """Prompts of step ``step`` (from 1). An epoch's incomplete last batch is left out, as verl leaves it out."""
    per_epoch = size // batch
    epoch, place = divmod(step - 1, per_epoch)
    return epoch_order(size, seed, epoch, shuffle)[place * batch : (place + 1) * batch]
