"""How a scored trajectory travels from an agent loop through TransferQueue to the trainer."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from poimen_exp.errors import RunFailed
from poimen_exp.gates.scoring import ScoredTrajectory
from poimen_exp.gates.types import Prompt, ReadingTask, Trajectory

FIELD = "poimen_trajectory"
"""Key of the record in the ``extra_fields`` of a session's last row."""


@dataclass(frozen=True)
class RowKey:
    """TransferQueue's key of a row: ``{uid}_{session}_{index}``."""

    uid: str
    session: int
    index: int

    @classmethod
    def parse(cls, key: str) -> RowKey:
        uid, session, index = key.rsplit("_", 2)
        return cls(uid, int(session), int(index))


def pack(scored: ScoredTrajectory) -> bytes:
    """Bytes without what the trainer does not need: chunk texts and prompt ids, which are most of it.

    A pickle and not the object: verl dumps extra fields with pydantic, which would turn dataclasses into dicts.
    """
    trajectory = scored.trajectory
    turns = tuple(replace(turn, prompt=_length_only(turn.prompt)) for turn in trajectory.turns)
    light = Trajectory(_without_texts(trajectory.task), turns, trajectory.exit_index, trajectory.answer)
    return pickle.dumps(replace(scored, trajectory=light))


def unpack(data: bytes) -> ScoredTrajectory:
    """What ``pack`` packed; only this program's own workers write it."""
    scored = pickle.loads(data)
    if not isinstance(scored, ScoredTrajectory):
        raise RunFailed(f"rollout record: got {type(scored).__name__}, expected ScoredTrajectory")
    return scored


def _length_only(prompt: Prompt) -> Prompt:
    """A prompt that knows its length: a range stands for the ids, five thousand of them in a few bytes."""
    return Prompt(cast("tuple[int, ...]", range(len(prompt.ids))), prompt.shared)


def _without_texts(task: ReadingTask) -> ReadingTask:
    return replace(task, chunks=("",) * len(task.chunks))


@dataclass(frozen=True)
class Batch:
    """The finished rollouts of one step.

    Attributes:
        scored: one a session, ``group`` numbered by first appearance of the prompt.
        row_of: key of each row to its index in ``gate_rows(scored)``.
    """

    scored: tuple[ScoredTrajectory, ...]
    row_of: Mapping[str, int]


def last_keys(keys: Sequence[str]) -> list[str]:
    """The key of every session's last row: the one that carries the record."""
    last: dict[tuple[str, int], str] = {}
    for key in keys:
        place = RowKey.parse(key)
        known = last.get((place.uid, place.session))
        if known is None or RowKey.parse(known).index < place.index:
            last[place.uid, place.session] = key
    return list(last.values())


def assemble(records: Mapping[str, bytes]) -> Batch:
    """Batch of the records of ``last_keys``."""
    groups: dict[str, int] = {}
    scored: list[ScoredTrajectory] = []
    row_of: dict[str, int] = {}
    for key, data in records.items():
        place = RowKey.parse(key)
        item = unpack(data)
        turns = len(item.trajectory.turns)
        if turns != place.index + 1:
            raise RunFailed(f"rollout {key}: {turns} turns recorded, {place.index + 1} rows arrived")
        group = groups.setdefault(place.uid, len(groups))
        scored.append(replace(item, group=group, sample=place.session))
        start = len(row_of)
        row_of.update({f"{place.uid}_{place.session}_{turn}": start + turn for turn in range(turns)})
    return Batch(tuple(scored), row_of)
