"""Rows of a rollout batch as padded tensors, with prompts that rollouts share laid out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poimen_exp.gates.types import Prompt


@dataclass(frozen=True)
class Row:
    """One prompt and the ids that were sampled after it: a turn of the gates, or a single-turn response."""

    prompt: Prompt
    response: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]

    @property
    def prefix(self) -> tuple[int, ...]:
        """The leading ids that other rows may have in common."""
        return self.prompt.ids[: self.prompt.shared]

    @property
    def suffix(self) -> tuple[int, ...]:
        """The prompt ids after the shared ones; never empty (``split_prompt``)."""
        return self.prompt.ids[self.prompt.shared :]


@dataclass(frozen=True)
class PackedRows:
    """Rows of one forward. U distinct prefixes, N rows.

    Attributes:
        prefix_ids: [U, P] left-padded.
        prefix_mask: [U, P] bool, True on ids.
        prefix_of: [N] int64 row of ``prefix_ids`` that each row starts with.
        suffix_ids: [N, S] left-padded rest of the prompts.
        suffix_mask: [N, S] bool.
        response_ids: [N, R] right-padded.
        response_mask: [N, R] bool, True on sampled ids: the only positions in a loss or a mean.
    """

    prefix_ids: Tensor
    prefix_mask: Tensor
    prefix_of: Tensor
    suffix_ids: Tensor
    suffix_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor


def pack(rows: Sequence[Row], pad_id: int, device: torch.device) -> PackedRows:
    """Lays rows out for one forward; rows with an equal prefix point to one copy of it."""
    index: dict[tuple[int, ...], int] = {}
    for row in rows:
        index.setdefault(row.prefix, len(index))
    prefix_ids, prefix_mask = pad_left(list(index), pad_id, device)
    suffix_ids, suffix_mask = pad_left([row.suffix for row in rows], pad_id, device)
    response_ids, response_mask = pad_right([row.response for row in rows], pad_id, device)
    prefix_of = torch.tensor([index[row.prefix] for row in rows], device=device)
    return PackedRows(prefix_ids, prefix_mask, prefix_of, suffix_ids, suffix_mask, response_ids, response_mask)


def pad_left(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[N, L] ids filled up on the left, and [N, L] bool True on ids; L may be 0."""
    return _pad(sequences, pad_id, device, left=True)


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[N, L] ids filled up on the right, and [N, L] bool True on ids; L may be 0."""
    return _pad(sequences, pad_id, device, left=False)


def _pad(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device, *, left: bool) -> tuple[Tensor, Tensor]:
    width = max((len(ids) for ids in sequences), default=0)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(sequences), width), dtype=torch.bool)
    for place, sequence in enumerate(sequences):
        where = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[place, where] = torch.tensor(sequence, dtype=torch.int64)
        mask[place, where] = True
    return ids.to(device), mask.to(device)


def micro_batches(rows: Sequence[Row], order: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cuts ``order`` (indices into ``rows``) into runs whose padded forward stays within ``token_budget`` tokens.

    Rows are taken by (prefix, length) so that shared prefixes meet in one forward; a single row above the budget
    goes alone. The cut changes speed and memory, never the loss: its denominator is the whole mini-batch's.
    """
    first_seen: dict[tuple[int, ...], int] = {}
    for place in order:
        first_seen.setdefault(rows[place].prefix, len(first_seen))
    ranked = sorted(order, key=lambda place: (len(rows[place].prefix), first_seen[rows[place].prefix], place))
    batches: list[list[int]] = []
    current = _Extent()
    for place in ranked:
        grown = current.with_row(rows[place], first_seen[rows[place].prefix])
        if batches and grown.tokens() <= token_budget:
            batches[-1].append(place)
            current = grown
        else:
            batches.append([place])
            current = _Extent().with_row(rows[place], first_seen[rows[place].prefix])
    return batches


@dataclass(frozen=True)
class _Extent:
    """Size of a padded forward: rows, distinct prefixes, and the longest of each part."""

    rows: int = 0
    prefixes: int = 0
    last_prefix: int = -1
    prefix: int = 0
    suffix: int = 0
    response: int = 0

    def with_row(self, row: Row, prefix_id: int) -> _Extent:
        """The size with one more row; rows of one prefix come one after another."""
        return _Extent(
            self.rows + 1,
            self.prefixes + (prefix_id != self.last_prefix),
            prefix_id,
            max(self.prefix, row.prompt.shared),
            max(self.suffix, len(row.prompt.ids) - row.prompt.shared),
            max(self.response, len(row.response)),
        )

    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return self.prefixes * self.prefix + self.rows * (self.suffix + self.response)
