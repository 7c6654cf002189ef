"""Text that stands, almost word for word, on two sides of the split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from poimen_exp.corpus.index import CorpusIndex, read_row
from poimen_exp.corpus.rows import DocumentRow
from poimen_exp.corpus.split import SIDES, ProjectSplit

if TYPE_CHECKING:
    from datasketch import MinHash

MIN_WORDS, SHINGLE, PERMUTATIONS, SIMILAR = 12, 5, 64, 0.8
BANDS, ROWS = 5, 11
"""Bands of a sketch, and hashes of a band: what datasketch takes for a similarity of 0.8 and 64 hashes."""
MAX_TEXTS, MAX_BYTES = 20_000, 32 * 2**20
"""A sample has at most twice as many texts, and at most twice as many bytes of text."""
_AT_ONCE = 64
_SHINGLES_AT_ONCE = 4096
Sketch = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class NearDuplicates:
    """Texts (units, or own chunks) of at least ``MIN_WORDS`` words on the held-out sides.

    Attributes:
        held_out: different texts of val and test that were looked at.
        equal: those that stand in train word for word (case and spacing aside); near: Jaccard similarity of their
            5-word shingles with a train text estimated at 0.8 or more.
        sampled: True if the corpus has more texts than are compared.
        compared: different texts of all sides that were looked at; texts: those that stand in the corpus, repeats
            counted.
        comparisons: pairs of sketches that were held against each other.
    """

    held_out: int
    equal: int
    near: int
    examples: tuple[tuple[str, str], ...]
    sampled: bool
    compared: int
    texts: int
    comparisons: int


def near_duplicates(index: CorpusIndex, split: ProjectSplit) -> NearDuplicates:
    """Compares different texts between train and the held-out sides by MinHash; a sample by hash of large corpora."""
    from datasketch import MinHash

    sample = _sample(index, split)
    texts = sample.kept
    empty = MinHash(num_perm=PERMUTATIONS, seed=1)
    train = _Sketches([key for key, (_, sides) in texts.items() if "train" in sides])
    for key in train.keys:
        train.add(_sketch(texts[key][0], empty))
    held = {key: (text, sides) for key, (text, sides) in texts.items() if sides - {"train"}}
    equal = near = 0
    examples: list[tuple[str, str]] = []
    for text, sides in held.values():
        if "train" in sides:
            equal += 1
            continue
        match = train.match(_sketch(text, empty))
        if match is not None:
            near += 1
            if len(examples) < 3:
                examples.append((text.decode()[:160], texts[match][0].decode()[:160]))
    return NearDuplicates(
        len(held), equal, near, tuple(examples), sample.sampled, len(texts), sample.seen, train.comparisons
    )


def _sketch(text: bytes, empty: MinHash) -> Sketch:
    """[PERMUTATIONS] least hash of the text's shingles under each permutation of ``empty``."""
    words = text.split(b" ")
    sketch = empty.copy()
    shingles = len(words) - SHINGLE + 1
    for start in range(0, shingles, _SHINGLES_AT_ONCE):
        stop = min(start + _SHINGLES_AT_ONCE, shingles)
        sketch.update_batch([b" ".join(words[at : at + SHINGLE]) for at in range(start, stop)])
    return np.asarray(sketch.hashvalues, np.uint32)


class _Sketches:
    """Sketches by band. A search ends at its first match: texts of one template all stand in the same bands.

    Attributes:
        keys: of the sketches, in the order in which they are added.
        comparisons: pairs held against each other so far.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self.keys, self.comparisons = keys, 0
        self._sketches = np.zeros((len(keys), PERMUTATIONS), np.uint32)
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        self._added = 0

    def add(self, sketch: Sketch) -> None:
        """Adds the sketch of the next key."""
        self._sketches[self._added] = sketch
        for band in _bands(sketch):
            self._bands.setdefault(band, []).append(self._added)
        self._added += 1

    def match(self, sketch: Sketch) -> bytes | None:
        """The key of a sketch that shares a band with this one and is similar enough, or None."""
        for band in _bands(sketch):
            candidates = self._bands.get(band, [])
            for start in range(0, len(candidates), _AT_ONCE):
                some = candidates[start : start + _AT_ONCE]
                self.comparisons += len(some)
                alike = (self._sketches[some] == sketch).mean(1) >= SIMILAR
                if alike.any():
                    return self.keys[some[int(alike.argmax())]]
        return None


def _bands(sketch: Sketch) -> list[tuple[int, bytes]]:
    return [(at, sketch[at : at + ROWS].tobytes()) for at in range(0, BANDS * ROWS, ROWS)]


class _Sample:
    """Texts by digest with the sides they stand on. Beyond ``MAX_TEXTS`` or ``MAX_BYTES`` the smallest digests stay:
    equal texts fall in or out together, whatever their side.

    Attributes:
        kept: UTF-8 text, case and spacing aside, and its sides.
        seen: texts that were offered, of ``MIN_WORDS`` words or more, repeats counted.
    """

    def __init__(self) -> None:
        self.kept: dict[bytes, tuple[bytes, set[str]]] = {}
        self.sampled, self.seen = False, 0
        self._bytes, self._bound = 0, b"\xff" * 9

    def add(self, side: str, text: str) -> None:
        words = text.casefold().split()
        if len(words) < MIN_WORDS:
            return
        self.seen += 1
        plain = " ".join(words).encode()
        digest = hashlib.blake2b(plain, digest_size=8).digest()
        if digest > self._bound:
            return
        known = self.kept.get(digest)
        if known is not None:
            known[1].add(side)
            return
        self.kept[digest] = (plain, {side})
        self._bytes += len(plain)
        if len(self.kept) > 2 * MAX_TEXTS or self._bytes > 2 * MAX_BYTES:
            self._halve()

    def _halve(self) -> None:
        """Keeps the smallest digests, as many as both bounds allow; one at least."""
        kept: dict[bytes, tuple[bytes, set[str]]] = {}
        size = 0
        for digest in sorted(self.kept)[:MAX_TEXTS]:
            size += len(self.kept[digest][0])
            if kept and size > MAX_BYTES:
                break
            kept[digest] = self.kept[digest]
        self.kept, self._bytes = kept, sum(len(text) for text, _ in kept.values())
        self._bound, self.sampled = max(kept), True


def _sample(index: CorpusIndex, split: ProjectSplit) -> _Sample:
    sample = _Sample()
    for side, text in _texts(index, split):
        sample.add(side, text)
    return sample


def _texts(index: CorpusIndex, split: ProjectSplit) -> Iterator[tuple[str, str]]:
    """Texts with their sides, in the order of the files: documents that have trajectories, then own chunks."""
    used = index.documents[np.unique(index.tasks["document"][index.tasks["document"] >= 0])]
    for place in used[np.lexsort((used["offset"], used["file"]))]:
        side = split.side_of.get(index.projects[int(place["project"])])
        if side in SIDES:
            row = read_row(index.files, place)
            assert isinstance(row, DocumentRow)
            yield from ((side, unit.text) for unit in row.units)
    for place in index.tasks[index.tasks["document"] < 0]:
        side = split.side_of.get(index.projects[int(place["project"])])
        own = read_row(index.files, place)
        if side in SIDES and not isinstance(own, DocumentRow) and isinstance(own.chunks, list):
            yield from ((side, chunk.text) for chunk in own.chunks)
