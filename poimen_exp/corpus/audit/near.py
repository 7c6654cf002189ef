"""Text that stands, almost word for word, on two sides of the split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from poimen_exp.corpus.index import CorpusIndex, read_row
from poimen_exp.corpus.rows import DocumentRow
from poimen_exp.corpus.split import SIDES, ProjectSplit

MIN_WORDS, SHINGLE, PERMUTATIONS, SIMILAR = 12, 5, 64, 0.8
MAX_TEXTS = 20_000


@dataclass(frozen=True)
class NearDuplicates:
    """Texts (units, or own chunks) of at least ``MIN_WORDS`` words on the held-out sides.

    Attributes:
        held_out: different texts of val and test that were looked at.
        equal: those that stand in train word for word (case and spacing aside); near: Jaccard similarity of their
            5-word shingles with a train text estimated at 0.8 or more.
        sampled: True if the corpus has more texts than are compared.
    """

    held_out: int
    equal: int
    near: int
    examples: tuple[tuple[str, str], ...]
    sampled: bool


def near_duplicates(index: CorpusIndex, split: ProjectSplit) -> NearDuplicates:
    """Compares different texts between train and the held-out sides by MinHash; a sample by hash of large corpora."""
    from datasketch import MinHash, MinHashLSH

    texts, sampled = _texts_by_side(index, split)
    train = {key: text for key, (text, sides) in texts.items() if "train" in sides}
    held = {key: (text, sides) for key, (text, sides) in texts.items() if sides - {"train"}}
    equal = sum("train" in sides for _, sides in held.values())
    lsh = MinHashLSH(threshold=SIMILAR, num_perm=PERMUTATIONS)
    hashes = {}
    for key, text in train.items():
        hashes[key] = _minhash(text, MinHash)
        lsh.insert(key, hashes[key])
    near = 0
    examples: list[tuple[str, str]] = []
    for text, sides in held.values():
        if "train" in sides:
            continue
        own = _minhash(text, MinHash)
        match = next((key for key in lsh.query(own) if own.jaccard(hashes[key]) >= SIMILAR), None)
        if match is not None:
            near += 1
            if len(examples) < 3:
                examples.append((text[:160], train[match][:160]))
    return NearDuplicates(len(held), equal, near, tuple(examples), sampled)


def _minhash(text: str, kind: Any) -> Any:
    words = text.split()
    sketch = kind(num_perm=PERMUTATIONS, seed=1)
    sketch.update_batch([" ".join(words[at : at + SHINGLE]).encode() for at in range(len(words) - SHINGLE + 1)])
    return sketch


def _texts_by_side(index: CorpusIndex, split: ProjectSplit) -> tuple[dict[bytes, tuple[str, set[str]]], bool]:
    """Texts by digest with the sides they stand on. Beyond ``MAX_TEXTS`` the smallest digests stay: equal texts fall
    in or out together, whatever their side.
    """
    texts: dict[bytes, tuple[str, set[str]]] = {}
    bound, sampled = b"\xff" * 9, False
    for side, text in _texts(index, split):
        plain = " ".join(text.casefold().split())
        digest = hashlib.blake2b(plain.encode(), digest_size=8).digest()
        if digest > bound or plain.count(" ") + 1 < MIN_WORDS:
            continue
        texts.setdefault(digest, (plain, set()))[1].add(side)
        if len(texts) > 2 * MAX_TEXTS:
            kept = sorted(texts)[:MAX_TEXTS]
            texts, bound, sampled = {key: texts[key] for key in kept}, kept[-1], True
    return texts, sampled


def _texts(index: CorpusIndex, split: ProjectSplit) -> Iterator[tuple[str, str]]:
    used = {int(position) for position in np.unique(index.tasks["document"])}
    for position, place in enumerate(index.documents):
        side = split.side_of.get(index.projects[int(place["project"])])
        if side in SIDES and position in used:
            row = read_row(index.files, place)
            assert isinstance(row, DocumentRow)
            yield from ((side, unit.text) for unit in row.units)
    for place in index.tasks[index.tasks["document"] < 0]:
        side = split.side_of.get(index.projects[int(place["project"])])
        own = read_row(index.files, place)
        if side in SIDES and not isinstance(own, DocumentRow) and isinstance(own.chunks, list):
            yield from ((side, chunk.text) for chunk in own.chunks)
