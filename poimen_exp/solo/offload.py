"""Roles take turns on the device: what is offloaded comes for a phase and lies in main memory outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def model_on_device(model: torch.nn.Module, device: torch.device, moves: bool) -> Iterator[None]:
    """A phase that needs ``model``; it goes back to main memory after it, also when the phase fails.

    Parameters stay the same objects, so that their optimizer goes on with them. Gradients are dropped, not carried.

    Args:
        moves: False for a model that stays on the device.
    """
    if not moves:
        yield
        return
    try:
        model.to(device)
        yield
    finally:
        model.zero_grad(set_to_none=True)
        model.to("cpu")
        _give_back(device)


@contextmanager
def state_on_device(optimizer: torch.optim.Optimizer, device: torch.device, moves: bool) -> Iterator[None]:
    """The same for what an optimizer keeps of its parameters."""
    if not moves:
        yield
        return
    try:
        move_state(optimizer, device)
        yield
    finally:
        optimizer.zero_grad(set_to_none=True)
        move_state(optimizer, torch.device("cpu"))
        _give_back(device)


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves an optimizer's moments; its step counts lie in main memory wherever the parameters are, as torch has it."""
    for kept in optimizer.state.values():
        for name, value in kept.items():
            if isinstance(value, Tensor) and name != "step":
                kept[name] = value.to(device)


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
