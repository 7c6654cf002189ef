"""Cuts in bytes: the byte tokenizer makes every count one that can be worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poimen_exp.corpus.chunking import ChunkingError, ChunkPlan, UnitCounts, chunk_text, plan_chunks, tokenizer_sha256
from poimen_exp.corpus.counting import WordEstimate
from poimen_exp.corpus.rows import Unit

from .support import ByteCodec


def plan(texts: list[str], limit: int, header: str | None = None) -> tuple[list[Unit], ChunkPlan]:
    units = [Unit(f"u{i}", text) if header is None else Unit(f"u{i}", text, header) for i, text in enumerate(texts)]
    return units, plan_chunks(units, limit, UnitCounts(ByteCodec()))


def texts_of(units: list[Unit], cut: ChunkPlan) -> list[str]:
    return [chunk_text(units, pieces) for pieces in cut.chunks]


def test_units_that_fit_together_share_a_chunk_and_none_is_cut() -> None:
    # "aaaa\n" and "bbbb\n" cost 5 each: two fit into 10, the third opens the next chunk.
    units, cut = plan(["aaaa", "bbbb", "cccc"], 10)
    assert texts_of(units, cut) == ["aaaa\nbbbb", "cccc"]
    assert cut.counts == (9, 4)


def test_the_header_stands_once_a_chunk_and_again_in_the_next() -> None:
    # "[H]\n" costs 4; 4 + 5 + 5 = 14 fills the first chunk.
    units, cut = plan(["aaaa", "bbbb", "cccc"], 14, "[H]")
    assert texts_of(units, cut) == ["[H]\naaaa\nbbbb", "[H]\ncccc"]


def test_a_change_of_header_is_shown_inside_a_chunk() -> None:
    units = [Unit("a", "one", "[1]"), Unit("b", "two", "[2]"), Unit("c", "bare")]
    cut = plan_chunks(units, 100, UnitCounts(ByteCodec()))
    assert texts_of(units, cut) == ["[1]\none\n[2]\ntwo\nbare"]


def test_a_unit_longer_than_a_chunk_is_cut_at_white_space() -> None:
    units, cut = plan(["aaaa bbbb cccc dddd"], 12)
    assert texts_of(units, cut) == ["aaaa bbbb ", "cccc dddd"]


def test_the_rest_of_a_long_unit_shares_its_chunk_with_the_next_unit() -> None:
    # A cut leaves one token of room for the line end: 9 bytes reach into "bbbb", so the cut is behind "aaaa ".
    units, cut = plan(["aaaa bbbb c", "d"], 10)
    assert texts_of(units, cut) == ["aaaa bbbb", " c\nd"]


def test_a_character_of_several_tokens_is_never_cut() -> None:
    units, cut = plan(["é" * 10], 7)  # two bytes each: three a chunk
    assert "".join(texts_of(units, cut)) == "é" * 10
    assert max(cut.counts) <= 7


def test_units_of_white_space_are_left_out() -> None:
    units, cut = plan(["a", " \n\t", "b"], 10)
    assert texts_of(units, cut) == ["a\nb"]


def test_a_header_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ChunkingError, match=r"header of unit 'u0' has 11 tokens, more than half of .* = 20"):
        plan(["a"], 20, "[12345678]"[:10])


def test_a_chunk_smaller_than_one_character_is_refused() -> None:
    with pytest.raises(ChunkingError, match=r"one character of unit 'u0' .* take 4 tokens"):
        plan(["🙂🙂"], 3)


class GrowingCodec(ByteCodec):
    """A text of several lines has one token a line more than its lines have alone."""

    def plain_offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        extra = text.rstrip("\n").count("\n") * 3
        return super().plain_offsets(text) + ((len(text), len(text)),) * extra


def test_a_chunk_that_is_longer_as_a_whole_than_its_parts_is_halved() -> None:
    units = [Unit("a", "aaaa"), Unit("b", "bbbb")]
    cut = plan_chunks(units, 10, UnitCounts(GrowingCodec()))  # 5 + 5 fit, but "aaaa\nbbbb" has 9 + 3
    assert texts_of(units, cut) == ["aaaa", "bbbb"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=12), st.integers(8, 40), st.sampled_from([None, "[H]"]))
def test_no_chunk_is_too_long_and_no_text_is_lost(texts: list[str], limit: int, header: str | None) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    units, cut = plan(texts, limit, header)
    seen = [""] * len(texts)
    for pieces in cut.chunks:
        assert len(chunk_text(units, pieces).encode()) <= limit
        for unit, start, end in pieces:
            seen[unit] += texts[unit][start:end]
    assert ["".join(one.split()) for one in seen] == ["".join(text.split()) for text in texts]


def test_the_word_estimate_counts_13_tokens_for_10_words() -> None:
    assert len(WordEstimate().encode_plain("w " * 10)) == 13
    assert len(WordEstimate().encode_plain("w " * 1000)) == 1300


@given(st.text(st.sampled_from("ab \n\t\x1c\x85\xa0\u2003\u200b\u3000\ufeffé")))
def test_the_word_estimate_counts_what_it_encodes(text: str) -> None:
    assert WordEstimate().count_plain(text) == len(WordEstimate().encode_plain(text))


def test_tokenizers_that_differ_have_different_hashes() -> None:
    class Other(ByteCodec):
        def encode_plain(self, text: str) -> tuple[int, ...]:
            return tuple(byte + (byte == 0x7A) for byte in text.encode())  # z differs

    assert tokenizer_sha256(ByteCodec()) == tokenizer_sha256(ByteCodec())
    assert tokenizer_sha256(ByteCodec()) != tokenizer_sha256(Other())
