"""The transformers rollout engine: many prompts at once, shared prefixes read once, new prompts join as rows end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from poimen_exp.gates.types import Generation, Prompt, Sampling
from poimen_exp.solo.decode import Decoder, Ended, Joining
from poimen_exp.solo.readers import Reader, reader_of
from poimen_exp.solo.rows import pad_left
from poimen_exp.solo.slots import Slots

T = TypeVar("T")

_JOIN_SHARE = 0.25
"""Waiting prompts join once they are this share of the rows being written: a prefill costs several decoding steps."""
_PREFILL_TOKENS = 65_536
"""Padded tokens of one prefill forward."""
_KEPT_PREFIX_TOKENS = 262_144
"""Prefix tokens whose keys and values are kept for rollouts of the group that come to the same chunk later."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    prompt: Prompt
    sampling: Sampling


Follow = Callable[[int, Generation], Request | None]
"""Takes the generation of a key; gives the next request of that key, or None."""


class TransformersEngine:
    """Samples from a causal language model in process.

    Args:
        model: the model that samples (adapters merged into its weights). Its attention becomes ``slots.ATTENTION``.
        stop_ids: ids that end a response.
        pad_id: id that fills batches; masked everywhere.
        max_rows: rows written at once; on a GPU fewer where its memory is short.
    """

    def __init__(self, model: Any, stop_ids: Sequence[int], pad_id: int, max_rows: int) -> None:
        self._model, self._pad_id, self._max_rows = model, pad_id, max_rows
        self._decoder = Decoder(model, Slots(model), stop_ids, pad_id)

    def sync(self) -> None:
        """Nothing to do: the sampler's weights are the policy's own copy."""

    def sleep(self) -> None:
        """Nothing to do: the slots are kept, and with them what was recorded."""

    def generate(self, requests: Sequence[Request], generator: torch.Generator) -> list[Generation]:
        """Continues every prompt; results in the order of ``requests``.

        Args:
            generator: on the model's device; the only source of randomness.
        """
        out: dict[int, Generation] = {}

        def keep(key: int, generation: Generation) -> None:
            out[key] = generation

        self.serve(dict(enumerate(requests)), keep, generator)
        return [out[key] for key in range(len(requests))]

    @torch.inference_mode()
    def serve(self, requests: Mapping[int, Request], follow: Follow, generator: torch.Generator) -> None:
        """Continues prompts until nobody asks any more: whoever gets an answer may ask again at once.

        Prompts of one sampling are written together; those of another wait until none is left.
        """
        waiting = dict(requests)
        reader = reader_of(self._model)
        prefixes = _Prefixes(self._model, reader, self._pad_id)

        def hand_out(ended: Ended) -> None:
            for key, generation in ended:
                request = follow(key, generation)
                if request is not None:
                    waiting[key] = request

        while waiting:
            sampling = next(iter(waiting.values())).sampling
            longest = max(_length(request) for request in waiting.values() if request.sampling == sampling)
            self._decoder.start(reader, sampling, min(self._max_rows, len(waiting)), longest + longest // 8)
            while True:
                for keys in self._to_join(waiting, sampling):
                    prompts = {key: waiting.pop(key).prompt for key in keys}
                    hand_out(self._decoder.join(prefixes.joining(prompts), generator))
                if not self._decoder.live:
                    break
                hand_out(self._decoder.step(generator))

    def _to_join(self, waiting: Mapping[int, Request], sampling: Sampling) -> list[list[int]]:
        """Keys of the prompts that join now, a list for each prefill; none until it pays.

        A prompt longer than the slots waits until all are free and can be made anew.
        """
        mine = [
            key
            for key, request in waiting.items()
            if request.sampling == sampling and self._decoder.fits(_length(request))
        ]
        count = min(len(mine), self._decoder.free)
        if count < max(1.0, _JOIN_SHARE * self._decoder.live):
            return []
        mine.sort(key=lambda key: _prefix(waiting[key].prompt))  # equal prefixes side by side; stable
        return _within_budget(mine[:count], lambda key: len(waiting[key].prompt.ids) - waiting[key].prompt.shared)


class _Prefixes:
    """Keys and values of prompt prefixes while one set of weights samples; the longest unused go first.

    Args:
        model: the model that samples.
        reader: with its weights.
    """

    def __init__(self, model: Any, reader: Reader, pad_id: int) -> None:
        self._model, self._reader, self._pad_id = model, reader, pad_id
        self._kept: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def joining(self, prompts: Mapping[int, Prompt]) -> list[Joining]:
        """What the decoder needs of each prompt; prefixes not kept are read now, each once."""
        wanted = list(dict.fromkeys(_prefix(prompt) for prompt in prompts.values()))
        missing = sorted((prefix for prefix in wanted if prefix not in self._kept), key=len)
        for batch in _within_budget([prefix for prefix in missing if prefix], len):
            self._read(batch)
        self._kept.setdefault((), self._nothing())
        for prefix in wanted:
            self._kept.move_to_end(prefix)
        out = [Joining(key, self._kept[_prefix(p)], p.ids[p.shared :]) for key, p in prompts.items()]
        while len(self._kept) > 1 and sum(map(len, self._kept)) > _KEPT_PREFIX_TOKENS:
            self._kept.popitem(last=False)
        return out

    def _read(self, prefixes: Sequence[tuple[int, ...]]) -> None:
        ids, mask = pad_left(prefixes, self._pad_id, self._model.device)
        lengths = [len(prefix) for prefix in prefixes]
        self._kept.update(zip(prefixes, self._reader.prefixes(ids, mask, lengths), strict=True))

    def _nothing(self) -> Tensor:
        model, config = self._model, self._model.config
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, 0, 1)
        return torch.zeros(shape, dtype=model.dtype, device=model.device)


def _within_budget(items: Sequence[T], width: Callable[[T], int]) -> list[list[T]]:
    """Cuts ``items`` into runs whose padded forward stays within ``_PREFILL_TOKENS``; one above it goes alone."""
    out: list[list[T]] = []
    widest = 0
    for item in items:
        widest = max(widest, width(item))
        if out and (len(out[-1]) + 1) * widest <= _PREFILL_TOKENS:
            out[-1].append(item)
        else:
            out.append([item])
            widest = width(item)
    return out


def _prefix(prompt: Prompt) -> tuple[int, ...]:
    return prompt.ids[: prompt.shared]


def _length(request: Request) -> int:
    return len(request.prompt.ids) + request.sampling.max_tokens
