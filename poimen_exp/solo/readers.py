"""What a model says after ids whose keys and values are in slots: by transformers, or by its arithmetic in one line.

A decoding step of a small model on a CPU spends as long between the operations as in them: transformers calls some ten
modules a layer, each of which looks for hooks, flags and keyword arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm

from poimen_exp.solo.forward import prefill
from poimen_exp.solo.slots import SlotView, grouped_attention

_BUILDS = ("LlamaForCausalLM", "Qwen2ForCausalLM")
"""Norm, attention with rotary positions, norm, gated MLP; what differs is which layers have biases."""


class Reader(Protocol):
    """Reads without gradient."""

    def logits(self, ids: Tensor, position: Tensor, view: SlotView) -> Tensor:
        """[N, V] logits after the last of ids [N, Q] at positions [N, Q]; each looks at the columns up to its own."""
        ...

    def prefixes(self, ids: Tensor, mask: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Keys and values [layers, 2, H, length, D] of each row of [U, P] left-padded ids."""
        ...


def reader_of(model: Any) -> Reader:
    """A reader with the weights that the model has now."""
    plain = not any(hasattr(module, "base_layer") for module in model.modules())  # no layer with an adapter
    if type(model).__name__ in _BUILDS and plain and model.device.type == "cpu" and model.dtype == torch.float32:
        return StraightReader(model)
    return PlainReader(model)


class PlainReader:
    """Lets ``transformers`` read: any model, and what a GPU records."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, ids: Tensor, position: Tensor, view: SlotView) -> Tensor:
        out = self._model(
            input_ids=ids,
            attention_mask=_may_look(position, view),
            position_ids=position,
            past_key_values=view,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def prefixes(self, ids: Tensor, mask: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        out, layers = [], prefill(self._model, ids, mask).layers
        for place, length in enumerate(lengths):
            own = slice(ids.shape[1] - length, None)
            sides = [torch.stack([layer.keys[place, :, own], layer.values[place, :, own]]) for layer in layers]
            out.append(torch.stack(sides))
        return out


class StraightReader:
    """The same logits up to rounding, by a copy of the weights in which layers that read the same input are one.

    Args:
        model: of one of the builds named above, in float32, on a CPU.
    """

    def __init__(self, model: Any) -> None:
        base, config = model.model, model.config
        self._embedding, self._rotary = base.embed_tokens.weight, base.rotary_emb
        self._layers = [_Layer(layer, config.num_attention_heads, config.num_key_value_heads) for layer in base.layers]
        self._norm, self._head = _Norm(base.norm), _Linear(model.lm_head.weight, model.lm_head.bias)
        self._slot = config.num_key_value_heads, base.layers[0].self_attn.head_dim

    def logits(self, ids: Tensor, position: Tensor, view: SlotView) -> Tensor:
        return self._head(self._norm(self._states(ids, position, view))[:, -1:])[:, -1]

    def prefixes(self, ids: Tensor, mask: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        rows, width = ids.shape
        heads, size = self._slot
        kv = torch.zeros((len(self._layers), 2, rows, heads, width + 1, size))  # the last column takes the padding
        position = (mask.cumsum(1) - 1).clamp(min=0)
        self._states(ids, position, SlotView(kv, slice(0, rows), width, torch.where(mask, position, width)))
        return [kv[:, :, place, :, :length].clone() for place, length in enumerate(lengths)]

    def _states(self, ids: Tensor, position: Tensor, view: SlotView) -> Tensor:
        """[N, Q, E] what the last layer gives."""
        x = embedding(ids, self._embedding)
        cos, sin = (side[:, :, None] for side in self._rotary(x, position))  # [N, Q, 1, D]
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        look = _may_look(position, view)
        bias = torch.zeros(look.shape).masked_fill_(~look, -torch.inf)
        for place, layer in enumerate(self._layers):
            x = layer(x, cos, sin, bias, view, place)
        return x


def _may_look(position: Tensor, view: SlotView) -> Tensor:
    """[N, 1, Q, C] bool, True on the columns up to each position [N, Q]."""
    columns = torch.arange(view.columns, device=position.device)
    return (columns <= position[:, :, None])[:, None]


@dataclass(frozen=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def _joined(*layers: Any) -> _Linear:
    """One layer that gives what these give, side by side."""
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return _Linear(torch.cat([layer.weight for layer in layers]), bias)


class _Norm:
    def __init__(self, norm: Any) -> None:
        self._weight, self._epsilon = norm.weight, norm.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight.shape, self._weight, self._epsilon)


class _Layer:
    """A decoder layer of ``transformers``.

    Args:
        heads, key_heads: of its attention.
    """

    def __init__(self, layer: Any, heads: int, key_heads: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._heads, self._key_heads = heads, key_heads
        self._size, self._scaling, self._act = attention.head_dim, attention.scaling, mlp.act_fn
        self._before, self._after = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = _Linear(attention.o_proj.weight, attention.o_proj.bias)
        self._gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self._down = _Linear(mlp.down_proj.weight, mlp.down_proj.bias)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, view: SlotView, place: int) -> Tensor:
        """[N, Q, E] of x [N, Q, E].

        Args:
            cos, sin: [N, Q, 1, D] of the rotary positions; sin negative in the first half, which loses the second.
            bias: [N, 1, Q, C] added to the products, minus infinity where an id may not look.
            place: of this layer in ``view``.
        """
        x = x + self._attend(self._before(x), cos, sin, bias, view, place)
        gate, up = self._gate_up(self._after(x)).chunk(2, -1)
        return x + self._down(self._act(gate) * up)

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, view: SlotView, place: int) -> Tensor:
        heads, key_heads, size = self._heads, self._key_heads, self._size
        qkv = self._qkv(x).view(*x.shape[:-1], heads + 2 * key_heads, size)  # [N, Q, heads, D]
        turned = qkv[:, :, : heads + key_heads]
        crossed = turned.roll(size // 2, -1).mul_(sin)
        turned.mul_(cos).add_(crossed)
        keys, values = view.store(qkv[:, :, heads:].view(*x.shape[:-1], 2, key_heads, size), place)
        out, _ = grouped_attention(None, qkv[:, :, :heads].transpose(1, 2), keys, values, bias, scaling=self._scaling)
        return self._output(out.flatten(2))
