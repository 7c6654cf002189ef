"""Writes many rows at once over one set of slots: rows join, take a token each step, and leave when they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poimen_exp.gates.types import Generation, Sampling
from poimen_exp.solo.readers import Reader
from poimen_exp.solo.rows import pad_left
from poimen_exp.solo.sampling import draw
from poimen_exp.solo.slots import Slots, SlotView, columns_for

_ROW_STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows that a recorded decoding step may have: the live ones are filled up to the next."""
_COLUMN_PARTS = 8
"""Recorded steps look at so many eighths of the columns."""


@dataclass(frozen=True)
class Joining:
    """A row that is to be written: its key, the keys and values of its prefix [layers, 2, H, P, D], the other ids."""

    key: int
    prefix: Tensor
    suffix: Sequence[int]


@dataclass(frozen=True)
class _Written:
    """What a row has so far."""

    ids: list[int]
    log_probs: list[float]


Ended = list[tuple[int, Generation]]
"""Rows that ended, by key."""


class Decoder:
    """The rows being written. Live rows are slots 0 to ``live`` - 1; a row that leaves is replaced by the last one.

    On a GPU a decoding step is recorded once for every size (CUDA graph) and played back: launching some six hundred
    small kernels costs several times what they compute. The sampler's weights are copied in place, so that what was
    recorded stays true after an update.

    Args:
        model: samples; not trained through here.
        stop_ids: ids that end a response.
    """

    def __init__(self, model: Any, slots: Slots, stop_ids: Sequence[int], pad_id: int) -> None:
        self._model, self._slots, self._pad_id = model, slots, pad_id
        self._stop = frozenset(stop_ids)
        self._recorded: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._pool: Any = None
        self._rows = self._room = 0
        self._keys: list[int] = []
        self._written: list[_Written] = []  # of the live rows, as is what follows
        self._lengths: list[int] = []  # as ``_length`` has them: known without asking the device
        self._token = self._length = torch.zeros(0, dtype=torch.int64, device=model.device)

    @property
    def live(self) -> int:
        """Rows being written."""
        return len(self._keys)

    @property
    def free(self) -> int:
        """Rows that may join."""
        return self._rows - self.live

    def fits(self, length: int) -> bool:
        """Whether a row of so many ids, prompt and response, has a place."""
        return length <= self._room

    def start(self, reader: Reader, sampling: Sampling, rows: int, columns: int) -> None:
        """Makes room for rows of one sampling, which ``reader`` reads. Nothing may be live."""
        assert not self.live
        self._reader = reader
        device = self._model.device
        if self._slots.reserve(rows, columns):
            self._recorded.clear()
            self._pool = None  # CUDA frees a pool with the last recording in it
            self._token = torch.zeros(self._slots.rows, dtype=torch.int64, device=device)
            self._length = torch.zeros_like(self._token)
        # Of this call, whatever was reserved before: a run that was resumed batches as one that was not.
        self._rows, self._room = min(rows, self._slots.rows), columns_for(columns)
        self._sampling = sampling

    def join(self, joining: Sequence[Joining], generator: torch.Generator) -> Ended:
        """Reads the prompts of new rows and draws their first ids; rows that these end come back at once."""
        first, last = self.live, self.live + len(joining)
        for places in _by_prefix(joining):
            self._slots.put([first + place for place in places], joining[places[0]].prefix)
        self._keys += [item.key for item in joining]
        self._written += [_Written([], []) for _ in joining]
        self._lengths += [item.prefix.shape[3] + len(item.suffix) for item in joining]
        logits = self._read_suffixes(slice(first, last), joining)
        self._length[first:last] = torch.tensor(self._lengths[first:], device=self._model.device)
        return self._take(slice(first, last), logits, generator)

    def step(self, generator: torch.Generator) -> Ended:
        """One more id for every live row."""
        logits = self._next_logits()[: self.live]
        self._length[: self.live] += 1
        self._lengths = [length + 1 for length in self._lengths]
        return self._take(slice(0, self.live), logits, generator)

    def _read_suffixes(self, rows: slice, joining: Sequence[Joining]) -> Tensor:
        """[N, V] logits after the last prompt id of rows whose prefixes are in their slots."""
        device = self._model.device
        ids, mask = pad_left([item.suffix for item in joining], self._pad_id, device)
        start = torch.tensor([item.prefix.shape[3] for item in joining], device=device)[:, None]
        position = (start + mask.cumsum(1) - 1).clamp(min=0)  # [N, Q]
        never_read = self._slots.kv.shape[4] - 1
        view = SlotView(self._slots.kv, rows, max(self._lengths[rows]), torch.where(mask, position, never_read))
        return self._reader.logits(ids, position, view)

    def _next_logits(self) -> Tensor:
        """[>= live, V] logits after the live rows' last ids."""
        columns = max(self._lengths) + 1
        if self._model.device.type != "cuda":
            return self._one_step(self.live, columns)
        width = self._slots.kv.shape[4]
        part = max(width // _COLUMN_PARTS, 1)
        rows = next((size for size in _ROW_STEPS if size >= self.live), self.live)
        size = (min(rows, self._slots.rows), min(-(-columns // part) * part, width))
        if size not in self._recorded:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._recorded[size] = record(lambda: self._one_step(*size), self._pool)
        return self._recorded[size]()

    def _one_step(self, rows: int, columns: int) -> Tensor:
        at = self._length[:rows, None]
        return self._reader.logits(self._token[:rows, None], at, SlotView(self._slots.kv, slice(0, rows), columns, at))

    def _take(self, rows: slice, logits: Tensor, generator: torch.Generator) -> Ended:
        """Draws an id for each of ``rows``, notes it, and lets those go that it ends."""
        token, log_prob = draw(logits, self._sampling, generator)
        self._token[rows] = token
        places, ended = [], []
        for place, (last, value) in enumerate(zip(token.tolist(), log_prob.tolist(), strict=True), rows.start):
            ids, log_probs = self._written[place].ids, self._written[place].log_probs
            ids.append(last)
            log_probs.append(value)
            stopped = last in self._stop
            if stopped or len(ids) == self._sampling.max_tokens:
                places.append(place)
                ended.append((self._keys[place], Generation(tuple(ids), tuple(log_probs), not stopped)))
        if places:
            self._leave(places)
        return ended

    def _leave(self, places: Sequence[int]) -> None:
        """Frees slots; the last live rows move into the gaps."""
        gone = set(places)
        left = self.live - len(gone)
        target = [place for place in places if place < left]
        source = [place for place in range(left, self.live) if place not in gone]
        if source:
            self._slots.move(source, target, max(self._lengths[place] for place in source))
            come, go = (torch.tensor(side, device=self._model.device) for side in (source, target))
            for state in (self._token, self._length):
                state[go] = state[come]
        for here, there in zip(target, source, strict=True):
            self._keys[here], self._lengths[here] = self._keys[there], self._lengths[there]
            self._written[here] = self._written[there]
        del self._keys[left:], self._lengths[left:], self._written[left:]


def _by_prefix(joining: Sequence[Joining]) -> list[list[int]]:
    """Places of the rows of each prefix tensor."""
    places: dict[int, list[int]] = {}
    for place, item in enumerate(joining):
        places.setdefault(id(item.prefix), []).append(place)
    return list(places.values())


def record(run: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
    """A call that plays back what ``run`` does on the GPU, with whatever its input tensors then hold.

    Args:
        pool: memory that all recordings share: only one is played at a time, and its result is read before the next.
    """
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # libraries set themselves up before the recording
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
