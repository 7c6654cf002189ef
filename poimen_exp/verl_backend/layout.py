"""Where each row of a rollout batch goes: whole groups to mini-batches, equal shares of each to the ranks.

verl counts rows: ``ppo_mini_batch_size * rollout.n`` of them make an optimizer step, so that trajectories of several
rows make more optimizer steps the longer they are, and a shuffle tears groups apart. Here a rollout batch always makes
the same number of mini-batches, each of whole groups; padding rows (mask 0) bring them to one length, because verl's
worker cuts its share into equal runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from poimen_exp.errors import RunFailed


@dataclass(frozen=True)
class Layout:
    """Order of a batch for verl's dispatch, which gives every rank one contiguous run of it.

    Attributes:
        order: positions in the batch; those from ``rows`` on are padding rows, appended to it first.
        pads: padding rows needed.
        rows_per_mini_batch: rows of one mini-batch over all ranks, padding included.
        mini_batches: real rows of every mini-batch, for checks and metrics.
    """

    order: tuple[int, ...]
    pads: int
    rows_per_mini_batch: int
    mini_batches: tuple[tuple[int, ...], ...]


def cut_groups(groups: Sequence[str], count: int, shuffle_seed: int | None) -> list[list[str]]:
    """Distinct groups in ``count`` runs of equal length (or one apart, where groups were lost), in order of appearance.

    Args:
        groups: group of each row.
        shuffle_seed: None keeps the order; verl's ``actor.shuffle`` shuffles groups here, never rows.
    """
    distinct = list(dict.fromkeys(groups))
    if len(distinct) < count:
        raise RunFailed(
            f"mini-batches: {len(distinct)} groups came back from the rollout, expected at least {count} (one an "
            "optimizer step): too many rollouts failed; the workers' log has the first error"
        )
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(distinct)
    short, longer = divmod(len(distinct), count)
    sizes = [short + (place < longer) for place in range(count)]
    return [distinct[sum(sizes[:place]) : sum(sizes[: place + 1])] for place in range(count)]


def lay_out(
    groups: Sequence[str],
    tokens: Sequence[int],
    *,
    count: int,
    ranks: int,
    rows_multiple: int = 1,
    shuffle_seed: int | None = None,
) -> Layout:
    """Layout of a batch of R rows.

    Args:
        groups: [R] group of each row.
        tokens: [R] prompt and response tokens, by which ranks are balanced.
        count: mini-batches.
        ranks: data-parallel size.
        rows_multiple: rows of a mini-batch on one rank are a multiple of this (the fixed micro-batch size; 1 with
            ``use_dynamic_bsz``).
    """
    runs = cut_groups(groups, count, shuffle_seed)
    mini_of = {group: place for place, run in enumerate(runs) for group in run}
    minis: list[list[int]] = [[] for _ in range(count)]
    for row, group in enumerate(groups):
        minis[mini_of[group]].append(row)
    per_rank = _round_up(max(math.ceil(len(mini) / ranks) for mini in minis), rows_multiple)
    next_pad = len(groups)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for mini in minis:
        for share, rows in zip(shares, _balanced(mini, tokens, ranks, per_rank), strict=True):
            missing = per_rank - len(rows)
            share.extend([*rows, *range(next_pad, next_pad + missing)])
            next_pad += missing
    order = tuple(place for share in shares for place in share)
    return Layout(order, next_pad - len(groups), per_rank * ranks, tuple(tuple(mini) for mini in minis))


def _balanced(rows: Sequence[int], tokens: Sequence[int], ranks: int, most: int) -> list[list[int]]:
    """Rows dealt to ranks, longest first, each to the rank with fewest tokens that has room."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for row in sorted(rows, key=lambda row: (-tokens[row], row)):
        rank = min((rank for rank in range(ranks) if len(shares[rank]) < most), key=lambda rank: load[rank])
        shares[rank].append(row)
        load[rank] += tokens[row]
    return [sorted(share) for share in shares]  # rows of a group and chunk stay neighbours


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
