"""Values of response tokens: one tensor a row, as long as its response; padded only where a function asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poimen_exp.solo.rows import Row

Ragged = tuple[Tensor, ...]
"""[length of the response] of each row."""


def spread(values: Tensor, rows: Sequence[Row]) -> Ragged:
    """One value a row [R], given to every token of its response."""
    return tuple(value.repeat(len(row.response)) for value, row in zip(values, rows, strict=True))


def padded(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[R, T] values filled up with 0 on the right, and [R, T] bool True on real tokens; T is the longest response."""
    width = max((len(row) for row in values), default=0)
    lengths = torch.tensor([len(row) for row in values], dtype=torch.int64)
    mask = torch.arange(width)[None] < lengths[:, None]
    out = torch.zeros(mask.shape)
    if len(values):
        out[mask] = torch.cat([row.detach().float().cpu() for row in values])
    return out, mask


def unpadded(values: Tensor, mask: Tensor) -> Ragged:
    """The rows of [R, T] without what ``mask`` leaves out."""
    return tuple(row[kept] for row, kept in zip(values, mask, strict=True))


def at(values: Sequence[Tensor], places: Sequence[int], mask: Tensor) -> Tensor:
    """[N, T] of the rows at ``places``, laid out under ``mask`` [N, T] on its device; 0 on padding."""
    flat = torch.cat([values[place] for place in places]).to(mask.device).float()
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, flat)
