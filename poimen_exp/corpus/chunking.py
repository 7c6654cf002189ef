"""Documents cut into chunks of at most so many tokens, along their units where these fit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import product
from string import ascii_lowercase
from typing import Protocol

import msgspec

from poimen_exp.corpus.rows import Unit

CHUNKING_VERSION = 1
"""Part of the cache key: raise it with any change of where chunks are cut."""

Piece = tuple[int, int, int]
"""(unit position, start, end): characters of one unit that stand in a chunk."""


class TokenCounter(Protocol):
    """What chunking needs of a tokenizer; every ``TextCodec`` is one."""

    def encode_plain(self, text: str) -> tuple[int, ...]: ...

    def plain_offsets(self, text: str) -> tuple[tuple[int, int], ...]: ...

    def count_plain(self, text: str) -> int: ...


class ChunkPlan(msgspec.Struct, frozen=True):
    """Where a document is cut. ``counts`` holds the tokens of each chunk's text, headers included."""

    chunks: tuple[tuple[Piece, ...], ...]
    counts: tuple[int, ...]


class ChunkingError(ValueError):
    """A document that cannot be cut to this size."""


def chunk_text(units: Sequence[Unit], pieces: Sequence[Piece]) -> str:
    """Text of one chunk: its pieces line by line, each header above the first piece it stands for."""
    lines: list[str] = []
    above: str | None = None
    for number, start, end in pieces:
        unit = units[number]
        heading = unit.heading
        if heading is not None and heading != above:
            lines.append(heading)
        above = heading
        lines.append(unit.text[start:end])
    return "\n".join(lines)


class UnitCounts:
    """Token counts of unit texts, kept by the text's hash: pooled documents share their paragraphs."""

    _LIMIT = 500_000

    def __init__(self, codec: TokenCounter) -> None:
        self.codec = codec
        self._known: dict[int, int] = {}

    def of(self, text: str) -> int:
        """Tokens of ``text``."""
        key = hash(text)
        count = self._known.get(key)
        if count is None:
            if len(self._known) >= self._LIMIT:
                self._known.clear()
            count = self._known[key] = self.once(text)
        return count

    def once(self, text: str) -> int:
        """Tokens of a text that will not come again."""
        return self.codec.count_plain(text)


def plan_chunks(units: Sequence[Unit], chunk_tokens: int, counts: UnitCounts) -> ChunkPlan:
    """Cuts ``units`` into chunks of at most ``chunk_tokens`` tokens, headers included.

    A unit stays whole unless it alone is longer than a chunk; then it is cut between tokens, at white space where
    the second half of the piece has some. Units of white space alone are left out.

    Raises:
        ChunkingError: a header leaves no room for the text below it.
    """
    return _Planner(units, chunk_tokens, counts).run()


class _Planner:
    """Fills chunks greedily by the units' own token counts, and counts each finished text once more as a whole."""

    def __init__(self, units: Sequence[Unit], chunk_tokens: int, counts: UnitCounts) -> None:
        self._units, self._limit, self._known = units, chunk_tokens, counts
        self._chunks: list[tuple[Piece, ...]] = []
        self._counts: list[int] = []
        self._open: list[Piece] = []
        self._used = 0
        self._heading: str | None = None
        self._heading_cost: dict[str, int] = {}

    def run(self) -> ChunkPlan:
        for index, unit in enumerate(self._units):
            if not unit.text or unit.text.isspace():
                continue
            own = self._known.of(unit.text + "\n")
            cost = self._opening_cost(unit) + own
            if self._used + cost > self._limit:
                self._close()
                cost = self._opening_cost(unit) + own
            if cost > self._limit:
                self._split(index)
            else:
                self._put((index, 0, len(unit.text)), cost)
        self._close()
        return ChunkPlan(tuple(self._chunks), tuple(self._counts))

    def _opening_cost(self, unit: Unit) -> int:
        """Tokens of the header line that this unit would need in the open chunk."""
        heading = unit.heading
        if heading is None or (self._open and heading == self._heading):
            return 0
        if heading not in self._heading_cost:
            cost = self._known.of(heading + "\n")
            if 2 * cost > self._limit:
                raise ChunkingError(
                    f"the header of unit {unit.unit_id!r} has {cost} tokens, more than half of corpus.chunk_tokens "
                    f"= {self._limit}; shorten it or raise corpus.chunk_tokens"
                )
            self._heading_cost[heading] = cost
        return self._heading_cost[heading]

    def _put(self, piece: Piece, cost: int) -> None:
        self._used += cost
        self._open.append(piece)
        self._heading = self._units[piece[0]].heading

    def _split(self, index: int) -> None:
        """Gives a unit longer than a chunk chunks of its own; the last piece leaves its chunk open."""
        unit = self._units[index]
        text, offsets = unit.text, self._known.codec.plain_offsets(unit.text)
        token, start = 0, 0
        while start < len(text):
            room = max(1, self._limit - self._opening_cost(unit) - 1)
            last = token + room >= len(offsets)
            end = len(text) if last else _cut_position(text, start, max(offsets[token + room][0], start + 1))
            following = token
            while following < len(offsets) and offsets[following][0] < end:
                following += 1
            if text[start:end].strip():
                self._put((index, start, end), self._opening_cost(unit) + following - token + 1)
                if end < len(text):
                    self._close()
            token, start = following, end

    def _close(self) -> None:
        pieces, self._open, self._used, self._heading = self._open, [], 0, None
        if pieces:
            self._settle(pieces)

    def _settle(self, pieces: list[Piece]) -> None:
        """Keeps a chunk whose text as a whole fits; halves one whose parts were shorter alone than together."""
        count = self._known.once(chunk_text(self._units, pieces))
        if count <= self._limit:
            self._chunks.append(tuple(pieces))
            self._counts.append(count)
            return
        if len(pieces) > 1:
            self._settle(pieces[:-1])
            self._settle(pieces[-1:])
            return
        unit, start, end = pieces[0]
        if end - start < 2:
            raise ChunkingError(
                f"one character of unit {self._units[unit].unit_id!r} and its header take {count} tokens, more than "
                f"corpus.chunk_tokens = {self._limit}; raise it"
            )
        middle = _cut_position(self._units[unit].text, start, (start + end + 1) // 2)
        for half in ((unit, start, middle), (unit, middle, end)):
            if self._units[unit].text[half[1] : half[2]].strip():
                self._settle([half])


def _cut_position(text: str, start: int, end: int) -> int:
    """``end``, or just behind the last white space of the second half of ``[start, end)``, so that words stay whole."""
    if end >= len(text) or text[end].isspace() or text[end - 1].isspace():
        return end
    space = max(text.rfind(" ", (start + end) // 2, end), text.rfind("\n", (start + end) // 2, end))
    return end if space < 0 else space + 1


def tokenizer_sha256(codec: TokenCounter) -> str:
    """Names a tokenizer by what it does: SHA-256 of the ids it gives a fixed text, as decimal numbers with spaces.

    The text has every pair and triple of lower-case letters after a space, all of U+0020 to U+04FF, and samples of
    figures, code and other scripts: tokenizers that differ in their rules or merges give other ids.
    """
    ids = codec.encode_plain(_probe_text())
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def _probe_text() -> str:
    pairs = " ".join(map("".join, product(ascii_lowercase, repeat=2)))
    triples = " ".join(map("".join, product(ascii_lowercase, repeat=3)))
    alphabet = "".join(map(chr, range(0x20, 0x500)))
    code = "def f(x):\n    return {'a': [1, 23, 456]}  # TODO\n\t<think>no</think>\r\n1234567890 3.14e-10\n\n\n"
    scripts = "你好世界 こんにちは 안녕하세요 नमस्ते สวัสดี שלום مرحبا 🙂👩‍👩‍👧 ﬁ é"
    prose = (
        "The meeting on Monday, 3 May 2024, moved the deadline; nobody objected. Deployment failed because the "
        "configuration had been overwritten. 'It's fine,' she said -- we'll retry tomorrow with 12,500 records."
    )
    return "\n".join((pairs, triples, alphabet, code, scripts, prose))
