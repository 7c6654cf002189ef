from __future__ import annotations

import random
from collections import Counter

from gates.fakes import ByteCodec, task

from poimen_exp.gates.protocol import GateProtocol, parse_turn
from poimen_exp.quickstart.turns import parse_verdict
from poimen_exp.solo.warm_start import balanced_rows


def _kinds(evidence: tuple[bool, ...], count: int) -> Counter[str]:
    protocol = GateProtocol(ByteCodec(), "chunk_first", "terse", 64)
    last = max(place for place, label in enumerate(evidence) if label)
    rows = balanced_rows(protocol, [task(evidence, last)], count, random.Random(1))
    assert len(rows) == count
    kinds: Counter[str] = Counter()
    for row in rows:
        gate = parse_turn(protocol.text_of(row.response))
        verdict = None if gate is None else parse_verdict(gate.think)
        kinds["answer" if verdict is None else "new" if verdict[0] else "nothing"] += 1
    return kinds


def test_half_of_the_warm_start_is_evidence_and_answers_however_rare_they_are() -> None:
    # 1 evidence chunk, 9 without, 1 answer turn: drawn evenly, 9 of 11 turns would say "nothing".
    assert _kinds((False,) * 9 + (True,), 40) == {"new": 10, "answer": 10, "nothing": 20}


def test_a_task_full_of_evidence_still_fills_the_batch() -> None:
    kinds = _kinds((True, True, True), 9)
    assert kinds["nothing"] == 0
    assert sum(kinds.values()) == 9
