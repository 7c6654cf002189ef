"""Prompts, the strict parser, the memory's cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poimen_exp.errors import Refused
from poimen_exp.gates.protocol import FIRST_MEMORY, format_turn, parse_answer, parse_turn
from poimen_exp.gates.types import GateTurn

from .fakes import ByteCodec, protocol, turn_text


def text_of(ids: tuple[int, ...]) -> str:
    return ByteCodec().decode(ids)


def test_chunk_first_shares_question_and_chunk_and_nothing_of_the_memory() -> None:
    one, two = (protocol().turn_prompt("q?", "the chunk", memory) for memory in ("first", "second memory"))
    assert one.shared == two.shared
    assert one.ids[: one.shared] == two.ids[: two.shared]
    assert text_of(one.ids) == "user: Question: q?\nChunk:\nthe chunk\nMemory: first\nassistant: "
    assert text_of(one.ids[: one.shared]) == "user: Question: q?\nChunk:\nthe chunk\nMemory: "


def test_memory_first_puts_the_memory_before_the_chunk() -> None:
    prompt = protocol("memory_first").turn_prompt("q?", "the chunk", "mem")
    assert text_of(prompt.ids) == "user: Question: q?\nMemory: mem\nChunk:\nthe chunk\nassistant: "
    assert text_of(prompt.ids[: prompt.shared]) == "user: Question: q?\nMemory: "


def test_the_answer_prompt_holds_question_and_memory_and_no_chunk() -> None:
    prompt = protocol().answer_prompt("q?", "mem")
    assert text_of(prompt.ids) == "user: Question: q?\nMemory: mem\nAnswer:\nassistant: "


def test_the_overhead_of_a_turn_is_what_its_slots_do_not_hold() -> None:
    made = protocol(wording="full")
    prompt = made.turn_prompt("q?", "the chunk", "mem")
    assert len(prompt.ids) == made.turn_overhead() + len("q?") + len("the chunk") + len("mem")


def test_slots_of_one_value_are_not_looked_for_in_another() -> None:
    prompt = protocol().turn_prompt("{chunk} \ue000memory\ue001 %s", "c", "m")
    assert "{chunk} \ue000memory\ue001 %s" in text_of(prompt.ids)


def test_a_template_that_loses_a_part_is_refused() -> None:
    class Lossy(ByteCodec):
        def render(self, user: str) -> str:
            return user[:20]

    from poimen_exp.gates.protocol import GateProtocol

    with pytest.raises(Refused, match="chat template lost parts"):
        GateProtocol(Lossy(), "chunk_first", "terse", 8)


@pytest.mark.parametrize(("argument", "value"), [("layout", "chunk_last"), ("wording", "long")])
def test_unknown_layouts_and_wordings_are_refused_by_key(argument: str, value: str) -> None:
    with pytest.raises(Refused, match=f"gates.{argument}: got '{value}'"):
        protocol(**{argument: value})  # type: ignore[arg-type]


def test_a_turn_may_run_over_lines_and_have_white_space_between_its_parts() -> None:
    text = "\n<think>a\nb</think>\n\n<check> yes </check>\n<update>- one\n- two</update>\n<next>\nend\n</next>\n"
    assert parse_turn(text) == GateTurn(think="a\nb", update=True, candidate="- one\n- two", end=True)


def test_what_a_part_holds_is_not_read_as_a_gate() -> None:
    parsed = parse_turn(
        "<think>check yes, next end</think><check>no</check><update>yes end</update><next>continue</next>"
    )
    assert parsed == GateTurn("check yes, next end", update=False, candidate="yes end", end=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        turn_text(True).replace("<think></think>", ""),
        turn_text(True).replace("yes", "Yes"),
        turn_text(True).replace("yes", "yes no"),
        turn_text(True).replace("continue", ""),
        turn_text(True, memory="<next>end</next>"),  # a tag twice, even inside a part
        turn_text(True, memory="</update>"),
        "<check>yes</check><think></think><update>m</update><next>end</next>",
        "Answer: " + turn_text(True),
        turn_text(True)[:-1],
    ],
)
def test_a_response_without_exactly_the_four_parts_does_not_parse(text: str) -> None:
    assert parse_turn(text) is None


_plain = st.text("ab yes\n\u00e9\u20ac/{}", max_size=12).map(str.strip)


@given(st.builds(GateTurn, _plain, st.booleans(), _plain, st.booleans()))
def test_a_formatted_turn_parses_back(turn: GateTurn) -> None:
    assert parse_turn(format_turn(turn)) == turn


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{1} no, \\boxed{ two }", "two"),
        ("\\boxed{f{x}{y}}", "f{x}{y}"),
        ("\\boxed{}", ""),
        ("\\boxed{open", None),
        ("boxed{4}", None),
        ("", None),
    ],
)
def test_the_answer_is_inside_the_last_box(text: str, answer: str | None) -> None:
    assert parse_answer(text) == answer


def test_the_token_that_ended_a_response_is_no_text() -> None:
    made = protocol()
    assert made.text_of((*b"yes", 256)) == "yes"
    assert made.text_of(tuple(b"yes")) == "yes"
    assert made.text_of(()) == ""


def test_a_memory_within_the_limit_is_kept_byte_for_byte() -> None:
    assert protocol(memory_tokens=5).cut_memory(" a\n\u00e9") == (" a\n\u00e9", 5)
    assert protocol().cut_memory(FIRST_MEMORY) == (FIRST_MEMORY, 18)


def test_a_cut_never_splits_a_character() -> None:
    # One byte a token: \u20ac has three.
    for limit, head, count in ((3, "a", 1), (4, "a\u20ac", 4), (5, "a\u20acb", 5), (0, "", 0)):
        assert protocol(memory_tokens=limit).cut_memory("a\u20acb\u20ac") == (head, count)


@given(st.text("ab\n\u00e9\u20ac\U0001f600", max_size=12), st.integers(0, 12))
def test_a_cut_memory_is_the_longest_head_that_fits(text: str, limit: int) -> None:
    head, count = protocol(memory_tokens=limit).cut_memory(text)
    assert text.startswith(head)
    assert count == len(head.encode()) <= limit
    if head != text:
        assert len(text[: len(head) + 1].encode()) > limit
