from __future__ import annotations

import random
from dataclasses import replace

import pytest

from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.protocol import FIRST_MEMORY, GateProtocol, parse_answer, parse_turn
from poimen_exp.gates.types import ExitTarget, GateTurn, ReadingTask
from poimen_exp.quickstart.logs import log_note
from poimen_exp.quickstart.turns import (
    GateSource,
    Note,
    constructed_turns,
    cut_text,
    evidence_note,
    merge_memory,
    parse_verdict,
    response_ids,
    verdict,
)

LINES = (
    "monday noon : mira moved the mail cache to cedar",
    "monday noon : otto sent the mail queue to oak",
    "friday night : nora put the shop queue on flint",
    "sunday night : nora put the shop lock on iron",
)
TASK = ReadingTask(
    task_id="t",
    project="p",
    question="where are the shop queue and the mail cache ?",
    answers=("flint cedar",),
    chunks=LINES,
    evidence=(True, False, True, False),
    exit=ExitTarget(True, 2),
)


def written(
    task: ReadingTask, protocol: GateProtocol, gates: GateSource, seed: int = 0, note: Note | None = log_note
) -> list[tuple[str, str]]:
    """(prompt text, response text) of each turn."""
    pairs = constructed_turns(task, protocol, random.Random(seed), gates=gates, note=note)
    return [(protocol.codec.decode(prompt), protocol.text_of(response)) for prompt, response in pairs]


def test_label_gates_update_on_evidence_and_end_at_the_target(protocol: GateProtocol) -> None:
    *turns, answer = written(TASK, protocol, "label")
    assert [parse_turn(text) for _, text in turns] == [
        GateTurn("new incomplete", True, "- mail cache cedar", False),
        GateTurn("nothing incomplete", False, "- mail cache cedar", False),
        GateTurn("new complete", True, "- mail cache cedar - shop queue flint", True),
    ]
    assert parse_answer(answer[1]) == "flint cedar"


def test_prompts_are_those_of_the_protocol(protocol: GateProtocol) -> None:
    pairs = constructed_turns(TASK, protocol, random.Random(0), note=log_note)
    assert pairs[0][0] == protocol.turn_prompt(TASK.question, LINES[0], FIRST_MEMORY).ids
    assert pairs[2][0] == protocol.turn_prompt(TASK.question, LINES[2], "- mail cache cedar").ids
    assert pairs[3][0] == protocol.answer_prompt(TASK.question, "- mail cache cedar - shop queue flint").ids


def test_every_response_ends_with_the_end_of_turn(protocol: GateProtocol) -> None:
    for _, response in constructed_turns(TASK, protocol, random.Random(0), gates="random"):
        assert response[-1] == protocol.codec.stop_ids[0]
        assert response.count(protocol.codec.stop_ids[0]) == 1


def test_random_gates_are_coins_whatever_the_chunk_holds(protocol: GateProtocol) -> None:
    updates: dict[bool, list[bool]] = {True: [], False: []}
    ends = []
    for seed in range(500):
        *turns, _ = written(TASK, protocol, "random", seed)
        assert len(turns) == 4  # every chunk is read
        for index, (_, text) in enumerate(turns):
            gate = parse_turn(text)
            assert gate is not None
            updates[bool(TASK.evidence[index])].append(gate.update)
            ends.append(gate.end)
    for drawn in updates.values():  # 1000 coins: standard deviation 0.016
        assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.06)
    assert sum(ends) / len(ends) == pytest.approx(0.4, abs=0.04)  # 2000 coins: 0.011


def test_random_gates_show_every_memory_that_wrong_gates_leave(protocol: GateProtocol) -> None:
    last_prompts, answers = set(), set()
    for seed in range(60):
        *turns, answer = written(TASK, protocol, "random", seed)
        last_prompts.add(turns[3][0].split("Memory: ")[1].split("<|im_end|>")[0])
        answers.add((answer[0].split("Memory: ")[1].split("\n")[0], parse_answer(answer[1])))
    cache, queue = "- mail cache cedar", "- shop queue flint"
    assert last_prompts == {FIRST_MEMORY, cache, queue, f"{cache} {queue}"}
    assert answers == {(memory, "unknown") for memory in (FIRST_MEMORY, cache, queue)} | {
        (f"{cache} {queue}", "flint cedar")
    }


def test_nothing_is_made_up_for_unknown_labels(protocol: GateProtocol) -> None:
    some = replace(TASK, evidence=(True, None, True, False))
    assert len(constructed_turns(some, protocol, random.Random(0), gates="random")) == 3  # no turn 1, no answer
    assert constructed_turns(replace(TASK, evidence=(None,) * 4), protocol, random.Random(0)) == []
    no_exit = constructed_turns(replace(TASK, exit=ExitTarget(False)), protocol, random.Random(0), gates="random")
    assert len(no_exit) == 1  # the answer
    assert len(constructed_turns(replace(TASK, answers=None), protocol, random.Random(0), gates="random")) == 4


def test_an_unanswerable_question_is_never_complete_and_keeps_its_answer(protocol: GateProtocol) -> None:
    task = replace(TASK, evidence=(False,) * 4, exit=ExitTarget(True), answers=("unknown",))
    *turns, answer = written(task, protocol, "label")
    assert [parse_turn(text) for _, text in turns] == [GateTurn("nothing incomplete", False, FIRST_MEMORY, False)] * 4
    assert parse_answer(answer[1]) == "unknown"


def test_a_turn_whose_text_would_not_parse_back_is_left_out(protocol: GateProtocol) -> None:
    task = replace(TASK, chunks=("the mail cache </update> cedar", *LINES[1:]))
    *turns, answer = written(task, protocol, "label", note=None)
    assert [parse_turn(text) for _, text in turns] == [
        GateTurn("nothing incomplete", False, FIRST_MEMORY, False),
        GateTurn("new incomplete", True, f"- {LINES[2]}", True),
    ]
    assert parse_answer(answer[1]) == "unknown"
    braces = replace(TASK, answers=("}{",))
    assert len(constructed_turns(braces, protocol, random.Random(0), note=log_note)) == 3


def test_corpus_text_never_becomes_a_control_token(codec: HfCodec, protocol: GateProtocol) -> None:
    text = "<think>a</think><check>yes</check><update>- <|im_end|></update><next>end</next>"
    ids = response_ids(text, codec)
    assert ids.count(codec.stop_ids[0]) == 1
    assert protocol.text_of(ids) == text


def test_the_note_is_the_sentence_with_the_answer_then_the_one_nearest_the_question(protocol: GateProtocol) -> None:
    chunk = "The shop opened. It sold a queue of mail cache parts. In the end flint cedar was bought! Then night."
    task = replace(TASK, chunks=(chunk,), evidence=(True,), exit=ExitTarget(True, 0))
    assert evidence_note(task, 0, protocol, 99) == "- In the end flint cedar was bought!"
    other = replace(task, answers=("nowhere",))
    assert evidence_note(other, 0, protocol, 99) == "- It sold a queue of mail cache parts."


def test_a_note_is_cut_to_whole_words(codec: HfCodec) -> None:
    text = "- shop queue flint - mail cache cedar"  # 8 tokens
    assert cut_text(text, 8, codec) == text
    assert cut_text(text, 7, codec) == "- shop queue flint - mail cache"
    assert cut_text("unspeakable", 1, codec) == ""


def test_notes_share_the_memory_so_that_the_last_one_still_fits(protocol: GateProtocol) -> None:
    chunk = "the mail cache and the shop queue " * 20
    task = replace(TASK, chunks=(chunk,) * 3, evidence=(True,) * 3, exit=ExitTarget(True, 2))
    *turns, _ = constructed_turns(task, protocol, random.Random(0))
    gate = parse_turn(protocol.text_of(turns[2][1]))
    assert gate is not None
    assert gate.candidate.count("- ") == 3
    assert len(protocol.codec.encode_plain(gate.candidate)) <= protocol.memory_tokens


def test_a_first_memory_gives_way_and_a_full_one_is_cut(protocol: GateProtocol) -> None:
    assert merge_memory(FIRST_MEMORY, "- mail cache cedar", protocol) == "- mail cache cedar"
    assert merge_memory("- mail cache cedar", "", protocol) == "- mail cache cedar"
    full = " ".join(["- shop queue flint"] * 8)  # 32 tokens
    assert merge_memory(full, "- mail cache cedar", protocol) == full


def test_verdicts_read_back() -> None:
    for new in (True, False):
        for complete in (True, False):
            assert parse_verdict(verdict(new, complete)) == (new, complete)
    assert parse_verdict("new") is None
