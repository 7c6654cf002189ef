"""Readers whose gates are not the model's: they frame what a trained reader can be worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from poimen_exp.gates.reading import GateOverride
from poimen_exp.gates.types import GateTurn, ReadingTask

Overrider = Callable[[ReadingTask], GateOverride]

_BINS = 10


def oracle(task: ReadingTask) -> GateOverride:
    """Gates as labelled: update on evidence, exit at the target. Unlabelled chunks and exits stay the model's."""

    def override(index: int, turn: GateTurn) -> GateTurn:
        label = task.evidence[index]
        end = turn.end if not task.exit.known else index == task.exit.index
        return replace(turn, update=turn.update if label is None else label, end=end)

    return override


def always_update(_: ReadingTask) -> GateOverride:
    """Updates at every chunk and reads to the end: a recurrent memory without gates (MemAgent)."""
    return lambda _index, turn: replace(turn, update=True, end=False)


def never_update(_: ReadingTask) -> GateOverride:
    """Never updates and reads to the end: right on every evidence-free chunk, and knows nothing."""
    return lambda _index, turn: replace(turn, update=False, end=False)


@dataclass(frozen=True)
class PositionRule:
    """What position alone says: in which tenths of a document to update, and after which share of it to exit.

    Attributes:
        update: [10] one decision for each tenth of the document.
        exit_share: exit once this share of the chunks was read; None reads to the end.
    """

    update: tuple[bool, ...]
    exit_share: float | None

    def reader(self, task: ReadingTask) -> GateOverride:
        """Gates from the chunk's place in the document, whatever it says."""
        count = len(task.chunks)
        end_index = None if self.exit_share is None else min(int(self.exit_share * count), count - 1)
        return lambda index, turn: replace(turn, update=self.update[_bin(index, count)], end=index == end_index)


def fit_position_rule(tasks: Iterable[ReadingTask]) -> PositionRule:
    """The best rule by position on training tasks: the likelier label of each tenth, the most exact exit share.

    A reader that does no better than this one has learnt positions.
    """
    positive, labelled = [0] * _BINS, [0] * _BINS
    exits: list[tuple[int | None, int]] = []
    for task in tasks:
        count = len(task.chunks)
        for index, label in enumerate(task.evidence):
            if label is not None:
                labelled[_bin(index, count)] += 1
                positive[_bin(index, count)] += label
        if task.exit.known:
            exits.append((task.exit.index, count))
    update = tuple(2 * hit > total for hit, total in zip(positive, labelled, strict=True))
    shares = [None, *(place / 20 for place in range(20))]
    return PositionRule(update, max(shares, key=lambda share: sum(_exact(share, *place) for place in exits)))


def _exact(share: float | None, target: int | None, count: int) -> bool:
    last = count - 1
    wanted = last if target is None else target
    return (last if share is None else min(int(share * count), last)) == wanted


def _bin(index: int, count: int) -> int:
    return min(index * _BINS // count, _BINS - 1)
