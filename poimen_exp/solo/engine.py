"""The transformers rollout engine: many prompts at once, shared prefixes prefilled once, finished rows leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poimen_exp.gates.types import Generation, Prompt, Sampling
from poimen_exp.solo.forward import extend, prefill_prefixes
from poimen_exp.solo.rows import pad_left

_COMPACT_BELOW = 0.75
"""Rows are dropped from the cache once fewer than this share is still being written: a copy of the cache costs more
than a few idle rows."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    prompt: Prompt
    sampling: Sampling


class TransformersEngine:
    """Samples from a causal language model in process.

    Args:
        model: the model that samples (adapters merged into its weights).
        stop_ids: ids that end a response.
        pad_id: id that fills batches; masked everywhere.
        max_rows: rows in one batch.
    """

    def __init__(self, model: Any, stop_ids: Sequence[int], pad_id: int, max_rows: int) -> None:
        self._model = model
        self._stop = torch.tensor(sorted(stop_ids), device=model.device)
        self._pad_id, self._max_rows = pad_id, max_rows

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], generator: torch.Generator) -> list[Generation]:
        """Continues every prompt; results in the order of ``requests``.

        Args:
            generator: on the model's device; the only source of randomness.
        """
        out: list[Generation | None] = [None] * len(requests)
        for sampling in dict.fromkeys(request.sampling for request in requests):
            mine = [place for place, request in enumerate(requests) if request.sampling == sampling]
            mine.sort(key=lambda place: _prefix(requests[place].prompt))  # equal prefixes side by side
            for start in range(0, len(mine), self._max_rows):
                places = mine[start : start + self._max_rows]
                prompts = [requests[place].prompt for place in places]
                for place, generation in zip(places, self._batch(prompts, sampling, generator), strict=True):
                    out[place] = generation
        return [generation for generation in out if generation is not None]

    def _batch(self, prompts: Sequence[Prompt], sampling: Sampling, generator: torch.Generator) -> list[Generation]:
        device = self._model.device
        index: dict[tuple[int, ...], int] = {}
        for prompt in prompts:
            index.setdefault(_prefix(prompt), len(index))
        ids, mask = pad_left(list(index), self._pad_id, device)
        prefix_of = torch.tensor([index[_prefix(prompt)] for prompt in prompts], device=device)
        cache, past_mask = prefill_prefixes(self._model, ids, mask, prefix_of)
        own, own_mask = pad_left([prompt.ids[len(_prefix(prompt)) :] for prompt in prompts], self._pad_id, device)
        logits = extend(self._model, own, own_mask, cache, past_mask, keep=1)[:, -1]
        return self._decode(logits, cache, torch.cat([past_mask, own_mask], 1), sampling, generator)

    def _decode(
        self, logits: Tensor, cache: Any, mask: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> list[Generation]:
        total = logits.shape[0]
        ids: Tensor = torch.full((total, sampling.max_tokens), self._pad_id, device=logits.device)
        log_probs = torch.zeros((total, sampling.max_tokens), device=logits.device)
        length = torch.zeros(total, dtype=torch.int64, device=logits.device)
        stopped = torch.zeros(total, dtype=torch.bool, device=logits.device)
        rows = torch.arange(total, device=logits.device)  # rows of the output that the batch still holds
        for place in range(sampling.max_tokens):
            token, log_prob = draw(logits, sampling, generator)
            writing = ~stopped[rows]
            ids[rows[writing], place] = token[writing]
            log_probs[rows[writing], place] = log_prob[writing]
            length[rows[writing]] = place + 1
            stopped[rows] |= torch.isin(token, self._stop)
            alive = ~stopped[rows]
            count = int(alive.sum())
            if count == 0 or place + 1 == sampling.max_tokens:
                break
            if count < _COMPACT_BELOW * rows.numel():
                cache.batch_select_indices(alive.nonzero()[:, 0])
                rows, token, mask = rows[alive], token[alive], mask[alive]
            step_mask = torch.ones((rows.numel(), 1), dtype=torch.bool, device=mask.device)
            logits = extend(self._model, token[:, None], step_mask, cache, mask, keep=1)[:, -1]
            mask = torch.cat([mask, step_mask], 1)
        return _collect(ids, log_probs, length, stopped)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[N] sampled ids, and [N] log-prob of each at the sampling temperature before top-p and top-k.

    Temperature 0 takes the likeliest id and gives its log-prob at temperature 1.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    log_probs = torch.log_softmax(scaled, -1)
    if sampling.temperature == 0.0:
        token = scaled.argmax(-1)
    else:
        token = torch.multinomial(_filtered(log_probs, sampling).exp(), 1, generator=generator)[:, 0]
    return token, log_probs.gather(-1, token[:, None])[:, 0]


def _filtered(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs with ids outside top-k and top-p at minus infinity; the likeliest id always stays."""
    if sampling.top_k > 0:
        floor = log_probs.topk(min(sampling.top_k, log_probs.shape[-1]), -1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < floor, -torch.inf)
    if sampling.top_p < 1.0:
        ranked, order = log_probs.sort(-1, descending=True)
        probs = torch.softmax(ranked, -1)
        beyond = probs.cumsum(-1) - probs >= sampling.top_p  # mass before this id already reaches top-p
        log_probs = log_probs.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return log_probs


def _prefix(prompt: Prompt) -> tuple[int, ...]:
    return prompt.ids[: prompt.shared]


def _collect(ids: Tensor, log_probs: Tensor, length: Tensor, stopped: Tensor) -> list[Generation]:
    columns = zip(ids.tolist(), log_probs.tolist(), length.tolist(), stopped.tolist(), strict=True)
    return [Generation(tuple(row[:n]), tuple(lp[:n]), not done) for row, lp, n, done in columns]
