"""Key-value cache of the rows an engine is writing: one slot a row, dense from column 0, in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poimen_exp.errors import Refused

ATTENTION = "poimen_grouped"
_COLUMN_STEP = 64
_CACHE_SHARE = 0.5
"""Of the memory that a GPU has free when the slots are made: the rest is for prefill, logits and the update."""


class Slots:
    """Keys and values [layers, 2, S, H, C, D] of up to S rows of up to C columns.

    A row's columns are 0 to its length - 1: no padding stands between them, so a length says what is valid. The last
    column is for what must be written and never read (padding of a prefill).

    Args:
        model: a causal language model whose layers all have full attention.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
            raise Refused(
                f"{config.model_type}: layers with a sliding window; the transformers engine has full attention"
            )
        if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
            raise Refused(f"{config.model_type}: got sliding_window={config.sliding_window}, expected full attention")
        use_grouped_attention(model)
        self._asked = 0
        heads = config.num_attention_heads
        self._head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._layers, self._heads = config.num_hidden_layers, config.num_key_value_heads
        self._dtype, self._device = model.dtype, model.device
        self.kv = torch.zeros((self._layers, 2, 0, self._heads, 0, self._head_size), device=self._device)

    @property
    def rows(self) -> int:
        """S."""
        return self.kv.shape[2]

    @property
    def columns(self) -> int:
        """Columns a row may have, without the one that is never read."""
        return max(self.kv.shape[4] - 1, 0)

    def reserve(self, rows: int, columns: int) -> bool:
        """Makes room for ``rows`` of ``columns`` each; fewer rows where a GPU's memory has no place for all.

        What the slots held is lost when they are made anew.

        Returns:
            Whether they were made anew.
        """
        if rows <= self._asked and columns <= self.columns:
            return False
        rows, columns = max(rows, self._asked), max(columns, self.columns)
        self._asked = rows  # memory may give fewer: asking again for as many changes nothing
        width = columns_for(columns) + 1
        empty = torch.empty((0,), dtype=self._dtype, device=self._device)
        self.kv = empty  # the old ones go before the new ones come
        shape = (self._layers, 2, self._rows_that_fit(rows, width), self._heads, width, self._head_size)
        self.kv = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return True

    def _rows_that_fit(self, rows: int, width: int) -> int:
        if self._device.type != "cuda":
            return rows
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        row_bytes: int = self._layers * 2 * self._heads * width * self._head_size * self._dtype.itemsize
        return max(1, min(rows, int(free * _CACHE_SHARE) // row_bytes))

    def put(self, slots: Sequence[int], prefix: Tensor) -> None:
        """Writes a prefix [layers, 2, H, P, D] to the first columns of each of these slots."""
        where = torch.tensor(slots, device=self._device)
        self.kv[:, :, where, :, : prefix.shape[3]] = prefix[:, :, None]

    def move(self, source: Sequence[int], target: Sequence[int], columns: int) -> None:
        """Copies the first ``columns`` of each slot in ``source`` to its partner in ``target``."""
        come, go = torch.tensor(source, device=self._device), torch.tensor(target, device=self._device)
        self.kv[:, :, go, :, :columns] = self.kv[:, :, come, :, :columns]


def columns_for(columns: int) -> int:
    """Columns that a row has where ``columns`` were asked for: one less than a multiple of 64."""
    return -(-(columns + 1) // _COLUMN_STEP) * _COLUMN_STEP - 1


class SlotView:
    """What a forward of ``transformers`` takes as its cache: some slots, read up to a column, written where told.

    Args:
        kv: [layers, 2, S, H, C, D].
        rows: [N] slots of the forward, as a slice: N neighbours.
        columns: how many columns attention looks at.
        write: [N, Q] column that each new position goes to.
    """

    def __init__(self, kv: Tensor, rows: slice, columns: int, write: Tensor) -> None:
        self._kv, self.columns, self._write = kv[:, :, rows], columns, write
        self._row = torch.arange(write.shape[0], device=write.device)[:, None]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stores [N, H, Q, D] keys and values of a layer; returns all of its [N, H, columns, D]."""
        for place, new in ((0, keys), (1, values)):
            self._kv[layer, place].transpose(1, 2)[self._row, self._write] = new.transpose(1, 2)
        every = self._kv[layer, :, :, :, : self.columns]
        return every[0], every[1]

    def store(self, new: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """``update`` of keys and values [N, Q, 2, H, D] that lie side by side: one write."""
        kv = self._kv[layer]  # [2, N, H, C, D]
        kv.permute(1, 3, 0, 2, 4)[self._row, self._write] = new
        every = kv[:, :, :, : self.columns]
        return every[0], every[1]


def never_attend_with_cudnn() -> None:
    """Leaves attention to torch's other kernels, for the whole process.

    cuDNN 9.19's backward gave NaN in every gradient at 704 keys of bfloat16 with left padding on an H200, finite
    gradients at other lengths; torch's memory-efficient and plain kernels gave finite ones for the same rows.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def use_grouped_attention(model: Any) -> None:
    """Lets the model attend through ``grouped_attention``."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ATTENTION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)


def grouped_attention(
    _module: torch.nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention that never repeats keys: the G query heads of a key head stand in line as queries.

    ``transformers``'s own ``sdpa`` repeats keys and values G times where there is a mask, which costs a decoding step
    several times what reading them once does.

    Args:
        query: [N, G * H, Q, D].
        key, value: [N, H, C, D].
        attention_mask: [N, 1, Q, C] bool, True where a query may look, or float, added to the products; None for a
            causal one.
        scaling: of the products; None for 1 / sqrt(D).

    Returns:
        [N, Q, G * H, D].
    """
    rows, heads, width, size = query.shape
    groups = heads // key.shape[1]
    causal = attention_mask is None and width > 1
    if groups == 1 or causal:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).contiguous(), None
    lined = query.reshape(rows, key.shape[1], groups * width, size)
    mask = attention_mask
    if mask is not None and width > 1:
        mask = mask.repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(lined, key, value, mask, dropout, scale=scaling)
    return out.reshape(rows, heads, width, size).transpose(1, 2).contiguous(), None
