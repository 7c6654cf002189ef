"""The reading loop: what the memory becomes, when it stops, what the answer turn sees."""

from __future__ import annotations

from poimen_exp.gates.check_script import MALFORMED
from poimen_exp.gates.protocol import FIRST_MEMORY
from poimen_exp.gates.reading import read
from poimen_exp.gates.types import GateTurn, Sampling, Trajectory

from .fakes import ByteCodec, Script, answer_text, byte_protocol, play, protocol, task, turn_text

SAMPLING = Sampling(1.0, 1.0, -1, 8)


def read_prompts(responses: list[str], memory_tokens: int = 64) -> tuple[Trajectory, list[str]]:
    """The reading of three chunks, and the text of every prompt."""
    script = Script(responses)
    coroutine = read(task(), protocol(memory_tokens=memory_tokens), script, SAMPLING)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value, [ByteCodec().decode(prompt.ids) for prompt in script.prompts]
    raise AssertionError


def test_yes_replaces_the_memory_and_no_keeps_it() -> None:
    trajectory, prompts = read_prompts(
        [turn_text(True, memory="one"), turn_text(False, memory="two"), turn_text(True, memory="three"), "\\boxed{x}"]
    )
    assert [turn.memory for turn in trajectory.turns] == ["one", "one", "three", "three"]
    seen = [prompt.split("Memory: ")[1].split("\n")[0] for prompt in prompts]
    assert seen == [FIRST_MEMORY, "one", "one", "three"]
    assert [turn.memory_tokens for turn in trajectory.turns] == [3, 3, 5, 5]


def test_no_keeps_the_memory_byte_for_byte() -> None:
    odd = "a  b\t\u00e9\u2028\u0085"
    trajectory, _ = read_prompts([turn_text(True, memory=odd), turn_text(False), turn_text(False), ""])
    # The parser strips the ends of a candidate (U+0085 and U+2028 are white space): what is kept then stays.
    assert [turn.memory for turn in trajectory.turns] == ["a  b\t\u00e9"] * 4


def test_a_malformed_turn_keeps_the_memory_and_reading_goes_on() -> None:
    trajectory, prompts = read_prompts([turn_text(True, memory="one"), MALFORMED, turn_text(False), answer_text("x")])
    assert [turn.chunk for turn in trajectory.turns] == [0, 1, 2, None]
    assert [turn.parsed for turn in trajectory.turns] == [True, False, True, True]
    assert trajectory.turns[1].gate is None
    assert trajectory.turns[1].memory == "one"
    assert "Memory: one" in prompts[2]


def test_end_applies_its_own_update_and_stops() -> None:
    trajectory, prompts = read_prompts([turn_text(False), turn_text(True, end=True, memory="last"), answer_text("x")])
    assert trajectory.exit_index == 1
    assert trajectory.turns[-1].memory == "last"
    assert "Memory: last" in prompts[-1]
    assert len(prompts) == 3


def test_end_without_an_update_keeps_the_memory() -> None:
    trajectory, prompts = read_prompts(
        [turn_text(True, memory="one"), turn_text(False, end=True, memory="two"), answer_text("x")]
    )
    assert (trajectory.exit_index, [turn.memory for turn in trajectory.turns]) == (1, ["one"] * 3)
    assert "Memory: one" in prompts[-1]


def test_without_an_end_everything_is_read_and_the_answer_row_still_comes() -> None:
    trajectory, prompts = read_prompts([turn_text(False)] * 3 + ["no box"])
    assert trajectory.exit_index == 2
    assert (trajectory.answer, trajectory.turns[-1].kind, trajectory.turns[-1].parsed) == (None, "answer", False)
    assert "Chunk" not in prompts[-1]
    assert [turn.chunk for turn in trajectory.chunk_turns] == [0, 1, 2]


def test_a_long_candidate_is_cut_before_it_becomes_the_memory() -> None:
    trajectory, prompts = read_prompts([turn_text(True, memory="abcdef")] + [turn_text(False)] * 2 + [""], 4)
    assert trajectory.turns[0].memory == "abcd"
    assert "Memory: abcd\n" in prompts[1]


def test_rows_hold_the_ids_that_were_sampled() -> None:
    trajectory, _ = read_prompts([turn_text(False, end=True), answer_text("x")])
    assert trajectory.turns[0].generation.ids == (*turn_text(False, end=True).encode(), 256)
    assert trajectory.turns[0].text == turn_text(False, end=True)


def test_an_override_is_obeyed_and_recorded_but_repairs_no_malformed_turn() -> None:
    def flip(index: int, turn: GateTurn) -> GateTurn:
        return GateTurn(turn.think, update=index == 0, candidate=turn.candidate, end=False)

    responses = [turn_text(False, memory="one"), MALFORMED, turn_text(True, end=True, memory="two"), answer_text("x")]
    trajectory = play(task(), byte_protocol(), responses, flip)
    assert [turn.memory for turn in trajectory.turns] == ["one"] * 4
    assert [turn.parsed for turn in trajectory.turns] == [True, False, True, True]
    assert trajectory.exit_index == 2
