"""What travels from an agent loop to the trainer."""

from __future__ import annotations

import pytest
from verl_samples import scored

from poimen_exp.errors import RunFailed
from poimen_exp.gates.scoring import advantages_of
from poimen_exp.verl_backend.records import RowKey, assemble, last_keys, pack, unpack


def test_a_key_is_read_from_its_end_because_uids_may_hold_underscores() -> None:
    assert RowKey.parse("a_b_3_12") == RowKey("a_b", 3, 12)


def test_the_last_row_of_a_session_is_found_in_any_order() -> None:
    assert last_keys(["u_0_2", "u_0_10", "u_1_0", "u_0_9"]) == ["u_0_10", "u_1_0"]


def test_a_record_loses_texts_and_prompt_ids_and_nothing_else() -> None:
    item = scored((True, None))
    back = unpack(pack(item))
    assert back.score == item.score
    assert back.trajectory.task.chunks == ("", "", "")
    assert back.trajectory.task.evidence == item.trajectory.task.evidence
    assert [turn.generation for turn in back.trajectory.turns] == [turn.generation for turn in item.trajectory.turns]
    assert [len(turn.prompt.ids) for turn in back.trajectory.turns] == [4, 4, 2]


def test_a_long_prompt_costs_a_record_nothing() -> None:
    assert len(pack(scored((True,)))) < 2000


def test_rows_are_found_by_key_whatever_order_the_sessions_came_in() -> None:
    records = {"b_1_1": pack(scored((True,))), "a_0_2": pack(scored((True, False))), "b_0_1": pack(scored((False,)))}
    batch = assemble(records)
    assert [(item.group, item.sample) for item in batch.scored] == [(0, 1), (1, 0), (0, 0)]
    assert batch.row_of == {"b_1_0": 0, "b_1_1": 1, "a_0_0": 2, "a_0_1": 3, "a_0_2": 4, "b_0_0": 5, "b_0_1": 6}


def test_advantages_of_the_assembled_rows_are_the_two_baselines() -> None:
    # Group b: update rewards +1 and -1 at chunk 0; both exit exactly, answer and parse: totals 2 and 2, so 0. The
    # turns differ from their mean 0 by 1 and -1: at alpha 0.75, 0.25 and -0.25; answer rows 0. Group a is alone: 0.
    records = {"b_1_1": pack(scored((True,))), "a_0_2": pack(scored((True, False))), "b_0_1": pack(scored((False,)))}
    batch = assemble(records)
    mixed = advantages_of(batch.scored, 0.75, "group_step")[1].mixed.tolist()
    by_key = {key: mixed[row] for key, row in batch.row_of.items()}
    assert by_key == {
        "b_1_0": 0.25,
        "b_1_1": 0.0,
        "a_0_0": 0.0,
        "a_0_1": 0.0,
        "a_0_2": 0.0,
        "b_0_0": -0.25,
        "b_0_1": 0.0,
    }


def test_a_record_that_does_not_fit_its_rows_ends_the_run() -> None:
    with pytest.raises(RunFailed, match=r"rollout u_0_3: 2 turns recorded, 4 rows arrived"):
        assemble({"u_0_3": pack(scored((True,)))})
