"""The gate check on corpora that can and cannot teach the gates, and its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from poimen_exp.gates import check_corpus, rewards, scoring
from poimen_exp.gates.check import GateCheckFailed, GateCheckReport, run_gate_check, write_refused_report
from poimen_exp.gates.check_corpus import CorpusRules
from poimen_exp.gates.check_report import Recorder
from poimen_exp.gates.outcome import Matcher
from poimen_exp.gates.rewards import OnUnparsed
from poimen_exp.gates.scoring import TurnBaseline
from poimen_exp.gates.types import ReadingTask

from .fakes import task


def on_corpus(
    tasks: Sequence[ReadingTask],
    alpha: float = 0.9,
    baseline: TurnBaseline = "group_step",
    on_unparsed: OnUnparsed = "zero_trajectory",
    matcher: Matcher = "exact",
    sample: int = 200,
) -> GateCheckReport:
    out = Recorder()
    check_corpus.check_corpus(tasks, CorpusRules(alpha, baseline, on_unparsed, matcher), sample, out)
    return GateCheckReport(tuple(out.checks), 0.0)


def failures(report: GateCheckReport) -> list[str]:
    return [check.name for check in report.failed]


MIXED = (
    task((False, True, False), 1),
    task((True, False), 0),
    task((None, True), 1),
    task((False, False), None),
    task((True, None), exit_known=False),
    task((False, True), 1, answers=("The", "red")),
)


@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("baseline", ["group_step", "batch_step"])
@pytest.mark.parametrize("on_unparsed", ["zero_trajectory", "zero_format"])
@pytest.mark.parametrize("matcher", ["exact", "contains", "f1"])
def test_a_sound_corpus_passes_under_all_settings(
    alpha: float, baseline: TurnBaseline, on_unparsed: OnUnparsed, matcher: Matcher
) -> None:
    assert failures(on_corpus(MIXED, alpha, baseline, on_unparsed, matcher)) == []


def test_a_corpus_without_answers_passes_with_a_maximum_of_one() -> None:
    report = on_corpus([task(answers=None), task((True, False), 0, answers=None)])
    assert failures(report) == []
    best = next(check for check in report.checks if "reward/total" in check.name)
    assert (best.got, best.expected) == ((1.0,), (1.0,))
    assert not any("outcome" in check.name for check in report.checks)


def test_without_a_label_nothing_can_be_told_apart() -> None:
    report = on_corpus([task((None, None), 1), task((None, None), 0)])
    assert failures(report) == ["corpus/update: labelled chunks, without which no gate can be told from its opposite"]
    with pytest.raises(GateCheckFailed, match=r"labelled chunks.*got 0, expected above 0"):
        report.require()


@pytest.mark.parametrize("tasks", [[task((True,), 0)], [task((True, None), exit_known=False)]])
def test_without_a_wrong_exit_nothing_can_be_told_apart(tasks: list[ReadingTask]) -> None:
    (name,) = failures(on_corpus(tasks))
    assert "every exit is right" in name


def test_an_empty_split_is_refused() -> None:
    assert failures(on_corpus([])) == ["corpus/tasks that an oracle can read"]


def test_an_exit_target_before_the_last_evidence_is_refused_with_its_place() -> None:
    report = on_corpus([task(), task((True, False, True), 1, name="t9")])
    assert [(check.name, check.where) for check in report.failed] == [
        ("corpus/exit: targets before the last evidence", "a.jsonl:t9: t9")
    ]


def test_an_answer_that_no_box_can_hold_is_left_out_of_the_sample() -> None:
    odd = task(answers=("}{", "\\boxed{x}"))
    assert failures(on_corpus([odd, task()])) == []
    assert failures(on_corpus([odd])) == ["corpus/tasks that an oracle can read"]
    assert failures(on_corpus([task(answers=("}", "{ok}"))])) == []


def test_the_sample_is_spread_over_the_split() -> None:
    tasks = [task(name=f"t{place}") for place in range(10)]
    assert [found.task_id for found in check_corpus._sample(tasks, 4)] == ["t0", "t2", "t5", "t7"]
    assert len(check_corpus._sample(tasks, 20)) == 10


def test_a_swapped_reward_is_refused_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "UPDATE_MATCH", -1.0)
    monkeypatch.setattr(rewards, "UPDATE_MISMATCH", 1.0)
    report = on_corpus(MIXED)
    found = next(check for check in report.failed if "mean reward of the oracle" in check.name)
    assert (found.got, found.expected, found.where) == ((-1.0,), (1.0,), "a.jsonl:t: t")


@pytest.mark.usefixtures("engines")
def test_the_whole_check_passes_and_says_so() -> None:
    report = run_gate_check(MIXED)
    assert failures(report) == []
    assert report.passed
    report.require()
    sections = {check.name.split("/")[0] for check in report.checks}
    assert sections == {
        "rewards", "labels", "advantages", "fixture", "metrics", "corpus", "rollout", "loss", "log_probs", "step",
    }  # fmt: skip


@pytest.mark.usefixtures("engines")
def test_a_task_without_gates_has_everything_but_the_corpus() -> None:
    report = run_gate_check(None)
    assert report.passed
    assert not [check for check in report.checks if check.name.startswith("corpus/")]


def test_a_crash_inside_a_part_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no rows today")

    monkeypatch.setattr(scoring, "advantages_of", broken)
    report = on_corpus(MIXED)
    assert [check.got for check in report.failed] == ["ValueError: no rows today"]
    assert report.failed[0].where.startswith("test_check.py:")


def test_a_report_is_plain_json_also_with_what_json_cannot_hold(tmp_path: Path) -> None:
    out = Recorder()
    with out.section("part"):
        out.equal("many", [1.0, None], [1.0, None])
        out.equal("nan", float("nan"), 0.0, where="a.jsonl:3")
        out.above("more", 2.0, 3.0)
    report = GateCheckReport(tuple(out.checks), 0.5)
    path = write_refused_report(report, tmp_path / "multirun")
    assert path.parent.parent == tmp_path / "multirun" / "refused"
    assert path.name == "gate_check.json"
    assert write_refused_report(report, tmp_path / "multirun").parent != path.parent
    read = json.loads(path.read_text())
    assert (read["passed"], read["failed"], read["seconds"]) == (False, 2, 0.5)
    assert read["checks"][0] == {
        "name": "part/many", "passed": True, "got": [1.0, None], "expected": [1.0, None], "where": "",
    }  # fmt: skip
    assert read["checks"][1]["got"] == ["nan"]
    assert read["checks"][2]["expected"] == "above 3"


def test_the_refusal_names_every_failed_check_with_its_numbers() -> None:
    out = Recorder()
    with out.section("part"):
        out.equal("good", 1.0, 1.0)
        out.equal("bad", 1.0, 2.0, where="here")
        out.equal("long", [0.0] * 20 + [3.0], [0.0] * 21)
    with pytest.raises(GateCheckFailed) as refusal:
        GateCheckReport(tuple(out.checks), 0.0).require()
    assert refusal.value.exit_code == 2
    text = str(refusal.value)
    assert "2 of 3 checks failed" in text
    assert "part/bad (here): got 1, expected 2" in text
    assert "part/long: entry 20: got 3, expected 0" in text
    assert "good" not in text


def test_a_check_that_compared_nothing_has_not_passed() -> None:
    with pytest.raises(GateCheckFailed, match="nothing was compared"):
        GateCheckReport((), 0.0).require()
