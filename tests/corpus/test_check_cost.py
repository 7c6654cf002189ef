"""What a check does grows with the corpus and no faster: operations are counted, not seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasketch import MinHash, MinHashLSH

from poimen_exp.corpus.audit import near, position
from poimen_exp.corpus.audit.check import CheckReport, _near_audit, check_corpus
from poimen_exp.corpus.audit.near import NearDuplicates, near_duplicates
from poimen_exp.corpus.cache import PlanCache
from poimen_exp.corpus.index import scan
from poimen_exp.corpus.lines import refuse
from poimen_exp.corpus.loader import TaskReader, by_document, decode_row
from poimen_exp.corpus.manifest import load_manifest
from poimen_exp.corpus.rows import DocumentRow
from poimen_exp.corpus.split import split_projects

from .support import SETTINGS, ByteCodec, document, labelled, question, write

Rows = list[dict[str, Any]]


def template_rows(texts: int, projects: int = 10) -> Rows:
    """``texts`` texts a project that differ in one of 80 words."""
    words = [f"w{n}" for n in range(80)]
    rows: Rows = []
    for p in range(projects):
        units = [" ".join([*words[:40], f"{p}.{k}", *words[40:]]) for k in range(texts)]
        rows += [document(f"d{p}", f"p{p}", units), question(f"q{p}", f"d{p}", [("u0", 0, 5)])]
    return rows


def compared(folder: Path) -> NearDuplicates:
    index = scan(load_manifest(folder), refuse)
    return near_duplicates(index, split_projects(index.projects, 0, 0.2, 0.2))


def check(folder: Path, codec: ByteCodec) -> CheckReport:
    settings = replace(SETTINGS, path=folder, chunk_tokens=200)
    return check_corpus(settings, codec, None, 0)


@pytest.mark.parametrize("texts", [20, 80])
def test_a_text_like_every_other_is_compared_with_a_few_of_them(tmp_path: Path, texts: int) -> None:
    found = compared(write(tmp_path / "c", template_rows(texts)))
    assert found.held_out == 4 * texts
    assert found.near > 0.9 * found.held_out
    # Six projects are in train: 480 candidates for each of the larger corpus, in up to five bands.
    assert found.comparisons <= 2 * near._AT_ONCE * found.held_out


def test_the_bands_are_those_of_datasketch() -> None:
    lsh = MinHashLSH(threshold=near.SIMILAR, num_perm=near.PERMUTATIONS)
    assert (lsh.b, lsh.r) == (near.BANDS, near.ROWS)


def test_a_long_text_is_hashed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    text = b" ".join(b"%d" % rng.randrange(50) for _ in range(300))
    whole = near._sketch(text, MinHash(num_perm=near.PERMUTATIONS, seed=1))
    monkeypatch.setattr(near, "_SHINGLES_AT_ONCE", 7)
    assert np.array_equal(near._sketch(text, MinHash(num_perm=near.PERMUTATIONS, seed=1)), whole)


def test_a_sample_of_texts_says_what_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "c", template_rows(30))
    for bound, value in (("MAX_TEXTS", 30), ("MAX_BYTES", 30 * 290)):  # a text has 285 bytes or so
        whole = compared(folder)
        assert (whole.sampled, whole.compared, whole.texts) == (False, 300, 300)
        assert "sample" not in _near_audit(whole).shown
        with monkeypatch.context() as patch:
            patch.setattr(near, bound, value)
            part = compared(folder)
        assert part.sampled
        assert 25 <= part.compared <= 2 * 32
        assert _near_audit(part).shown.endswith(f"; sample of {part.compared} of 300 texts")


def test_a_sample_of_chunks_says_what_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [labelled(f"t{n}", f"p{n % 4}", [n % 2 == 0, n % 2 == 1, False]) for n in range(200)]
    monkeypatch.setattr(position, "MAX_CHUNKS", 300)
    report = check(write(tmp_path / "c", rows), ByteCodec())
    for gate in ("evidence", "exit"):
        shown = next(one.shown for one in report.audits if one.name == f"position leak: {gate}")
        chunks, rest = shown.split(", sample of ")[1].split(" ", 1)
        assert rest == "of 600 chunks, 4 projects"
        assert 200 < int(chunks) < 400


def interleaved(documents: int, asked: int) -> Iterator[dict[str, Any]]:
    """Documents of 20 units, then ``asked`` trajectories of each, one after the other document's."""
    for n in range(documents):
        yield document(f"d{n}", f"p{n % 10}", [f"{n} {k} " + "x" * 50 for k in range(20)], header=f"[{n}]")
    for turn in range(asked):
        for n in range(documents):
            yield question(f"q{n}-{turn}", f"d{n}", [("u3", 0, 5)])


class CountingCodec(ByteCodec):
    """Adds up the characters whose tokens were counted, and those whose tokens were listed."""

    def __init__(self) -> None:
        self.counted = self.listed = 0

    def plain_offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        self.listed += len(text)
        return super().plain_offsets(text)

    def count_plain(self, text: str) -> int:
        self.counted += len(text)
        return len(text.encode())


def test_a_document_is_read_once_and_its_text_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "c", interleaved(documents=40, asked=5))
    read: list[str] = []

    def counting(line: bytes) -> Any:
        row = decode_row(line)
        if isinstance(row, DocumentRow):
            read.append(row.document_id)
        return row

    monkeypatch.setattr("poimen_exp.corpus.loader.decode_row", counting)
    codec = CountingCodec()
    assert check(folder, codec).n_problems == 0
    assert sorted(read) == sorted(f"d{n}" for n in range(40))
    size = (folder / "corpus.jsonl").stat().st_size
    assert codec.listed == 0  # every unit fits into a chunk
    assert codec.counted <= 2 * size  # each unit, and each chunk as a whole


def test_tasks_of_a_document_stand_together_and_else_in_file_order(tmp_path: Path) -> None:
    rows: Rows = [document("a", "p0", ["x"]), document("b", "p1", ["y"])]
    rows += [question("q0", "b"), labelled("t1", "p2", [True]), question("q2", "a"), question("q3", "b")]
    index = scan(load_manifest(write(tmp_path / "c", rows)), refuse)
    assert by_document(index) == [0, 3, 1, 2]


def test_large_documents_are_not_all_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = scan(load_manifest(write(tmp_path / "c", interleaved(documents=6, asked=1))), refuse)
    one = int(index.documents["length"].max())
    monkeypatch.setattr("poimen_exp.corpus.loader._RECENT_BYTES", 2 * one)
    reader = TaskReader(index, 200, ByteCodec(), PlanCache("test"))
    for place in range(6):
        reader.read(place)
    assert len(reader._recent) == 2
    monkeypatch.setattr("poimen_exp.corpus.loader._RECENT_BYTES", 1)
    assert len(reader.read(0).chunks) > 1
    assert len(reader._recent) == 1
