"""Audits: an injected fault is found, a good corpus is not flagged."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from poimen_exp.corpus.audit.check import CheckReport, check_corpus
from poimen_exp.corpus.audit.facts import spelled
from poimen_exp.corpus.audit.position import Auroc, _area, leaks
from poimen_exp.corpus.audit.report import as_json, write_html
from poimen_exp.gates.types import ExitTarget, ReadingTask

from .support import SETTINGS, ByteCodec, document, labelled, prompt_tokens, question, three_projects, write, write_raw

WORDS = [f"word{n}" for n in range(400)]


def prose(rng: random.Random, words: int = 8) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def shuffled_corpus(folder: Path, shuffle_seed: str, gold: int = 2, questions: int = 60) -> Path:
    """``questions`` documents of 20 paragraphs, the gold ones first, then shuffled by ``shuffle_seed`` of the id."""
    rows: list[dict[str, Any]] = []
    for number in range(questions):
        rng = random.Random(f"text {number}")
        paragraphs = [(prose(rng), place < gold) for place in range(20)]
        random.Random(shuffle_seed.format(number)).shuffle(paragraphs)
        rows.append(document(f"d{number}", f"p{number % 10}", [text for text, _ in paragraphs]))
        spans = [(f"u{at}", 0, len(text)) for at, (text, is_gold) in enumerate(paragraphs) if is_gold]
        rows.append(question(f"q{number}", f"d{number}", spans, answers=None))
    return write(folder, rows)


def check(folder: Path, max_prompt_length: int = 10_000, **changes: Any) -> CheckReport:
    settings = replace(
        SETTINGS, path=folder, **({"chunk_tokens": 80, "val_fraction": 0.2, "test_fraction": 0.2} | changes)
    )
    return check_corpus(settings, ByteCodec(), prompt_tokens, max_prompt_length)


def audit(report: CheckReport, name: str) -> Any:
    return next(one for one in report.audits if one.name == name)


def test_a_shuffle_with_one_fixed_seed_is_flagged_as_position_leak(tmp_path: Path) -> None:
    report = check(shuffled_corpus(tmp_path / "c", "4"))
    leak = audit(report, "position leak: evidence")
    assert leak.warn
    assert leak.value > 0.9
    assert audit(report, "position leak: exit").warn


def test_a_shuffle_of_the_questions_own_is_not_flagged(tmp_path: Path) -> None:
    report = check(shuffled_corpus(tmp_path / "c", "{}"))
    leak = audit(report, "position leak: evidence")
    assert not leak.warn
    assert 0.35 < leak.value < 0.65
    assert leak.verdict == "ok"
    # 60 documents of 20 chunks
    assert re.fullmatch(r"AUROC 0\.\d{3} \[0\.\d{3}, 0\.\d{3}\] 95 %, 1,200 chunks, 10 projects", leak.shown)
    exits = audit(report, "position leak: exit")
    assert not exits.warn
    assert re.search(r" 95 %, random places 0\.\d{3}, 1,200 chunks, 10 projects$", exits.shown)


def test_the_lateness_of_the_last_of_many_is_no_leak() -> None:
    assert not leaks("exit", Auroc(0.70, by_chance=0.69, beyond_chance=False))
    assert leaks("exit", Auroc(0.80, by_chance=0.69, beyond_chance=True))
    assert leaks("evidence", Auroc(0.70))
    assert not leaks("evidence", Auroc(0.65))
    assert not leaks("evidence", Auroc(None))


def test_the_area_is_the_share_of_pairs_in_the_right_order() -> None:
    # Scores by rank 0, 1, 2: positives 0, 1, 2; negatives 3, 1, 0. Pairs 3 * 4 = 12. Rank 1: 3 below and one tie,
    # 3.5; rank 2: 2 * 4 = 8. Area 11.5 / 12.
    positives, negatives = np.array([[0, 1, 2]]), np.array([[3, 1, 0]])
    assert _area(positives, negatives) == pytest.approx(11.5 / 12)
    labels = [0, 0, 0, 1, 0, 1, 1]
    assert _area(positives, negatives) == pytest.approx(roc_auc_score(labels, [0, 0, 0, 1, 1, 2, 2]))


def test_pairs_are_compared_within_a_fold() -> None:
    # Two folds, each with its pairs in the right order; across folds they would be in the wrong one.
    assert _area(np.array([[0, 1, 0, 0], [0, 0, 0, 1]]), np.array([[1, 0, 0, 0], [0, 0, 1, 0]])) == 1.0


def test_all_problems_are_listed_each_with_its_line(tmp_path: Path) -> None:
    rows = [*three_projects(), labelled("long", "p0", [False] * 9)]
    good = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    bad = b'nonsense\n{"type":"x"}\n' + json.dumps(question("q", "nowhere")).encode() + b"\n"
    twice = json.dumps(labelled("t0", "p0", [True])).encode() + b"\n"
    report = check(write_raw(tmp_path / "c", good + bad + twice, 99), max_chunks=5)
    places = [problem.split("corpus.jsonl:")[1].split(":")[0] for problem in report.problems]
    assert sorted(places) == ["4", "5", "6", "7", "8", "8"]  # 8: the id twice, and the number of rows
    assert report.n_problems == 6


def test_bad_labels_of_both_gates_are_listed(tmp_path: Path) -> None:
    block = {"origin": "labeled", "agreement": None}
    folder = write(tmp_path / "c", three_projects(), labels={"update": block, "exit": block})
    report = check(folder)
    assert [problem.split(" ")[1] for problem in report.problems] == [
        "labels.update.agreement:", "labels.exit.agreement:",
    ]  # fmt: skip
    assert report.label_status == "unmeasured"
    assert check(folder, allow_unmeasured=True).n_problems == 0


def test_too_long_tasks_are_problems_or_dropped(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", [labelled("long", "p0", [False] * 9), *three_projects()])
    assert check(folder, max_chunks=5).n_problems == 1
    assert check(folder, max_chunks=5, on_too_long="drop").dropped == {"too_many_chunks": 1}
    assert check(folder, max_prompt_length=40).n_problems == 4


def test_evidence_cut_by_a_border_and_chunks_without_header_are_counted(tmp_path: Path) -> None:
    units = [
        {"unit_id": "u0", "text": "a" * 50, "header": "[1]"},
        {"unit_id": "u1", "text": "between"},
        {"unit_id": "u2", "text": ("word " * 40).strip()},  # 199 bytes: three chunks of 80, none with a header
    ]
    rows: list[dict[str, Any]] = [{"type": "document", "document_id": "d", "project": "p0", "units": units}]
    rows += [question("t0", "d", [("u0", 0, 5), ("u0", 9, 12), ("u2", 0, 199)]), *three_projects()[1:]]
    report = check(write(tmp_path / "c", rows))
    assert audit(report, "evidence cut by chunk borders").value == 0.5
    assert audit(report, "chunks without their header").shown.startswith("30.0% (3 of 10)")
    assert audit(report, "chunks without their header").warn


def test_evidence_in_neighbouring_units_is_one_passage(tmp_path: Path) -> None:
    rows = [document("d", "p0", ["a" * 50, "b" * 50]), question("t0", "d", [("u0", 0, 5), ("u1", 0, 5)])]
    report = check(write(tmp_path / "c", [*rows, *three_projects()[1:]]))
    assert audit(report, "evidence cut by chunk borders").shown == "100.0% (1 of 1)"


@pytest.mark.parametrize(
    ("answers", "chunks", "expected"),
    [
        (("Ann",), ("saw ANN there", "gold"), 1),
        (("Ann",), ("saw Anna there", "gold"), 0),
        (("yes",), ("yes", "gold"), -1),
        (("one two three four five six seven",), ("x", "gold"), -1),
        (None, ("x", "gold"), -1),
    ],
)
def test_answers_in_evidence_free_chunks(
    answers: tuple[str, ...] | None, chunks: tuple[str, ...], expected: int
) -> None:
    task = ReadingTask("t", "p", "?", answers, chunks, (False, True), ExitTarget(True, 1))
    assert spelled(task) == expected
    unlabelled = replace(task, evidence=(None, True))
    assert spelled(unlabelled) == min(expected, 0)


def test_near_duplicates_across_the_split_are_found(tmp_path: Path) -> None:
    rng = random.Random(0)
    base = prose(rng, 60)
    rows: list[dict[str, Any]] = []
    for p in range(10):
        near = base.replace("word1", f"changed{p} word1", 1)
        rows += [document(f"d{p}", f"p{p}", [prose(rng, 30), near]), question(f"q{p}", f"d{p}", [("u0", 0, 5)])]
    shared = audit(check(write(tmp_path / "near", rows)), "text shared across the split")
    assert shared.warn
    assert shared.shown.startswith("50.0% (4 of 8): 0 equal, 4 nearly")  # 2 val and 2 test projects, one text each
    clean = [row | {"units": row["units"][:1]} if row["type"] == "document" else row for row in rows]
    assert audit(check(write(tmp_path / "clean", clean)), "text shared across the split").value == 0


def test_one_class_is_undefined_and_warned_about(tmp_path: Path) -> None:
    rows = [labelled(f"t{p}", f"p{p}", [True, True]) for p in range(4)]
    report = check(write(tmp_path / "c", rows))
    leak = audit(report, "position leak: evidence")
    assert (leak.shown, leak.verdict) == ("undefined (one class, or one place): 8 chunks, 4 projects", "-")
    assert audit(report, "chunks with evidence").verdict == "warning"


def test_too_little_to_say_is_not_ok(tmp_path: Path) -> None:
    report = check(write(tmp_path / "few", three_projects()))
    for gate in ("evidence", "exit"):
        leak = audit(report, f"position leak: {gate}")
        assert (leak.value, leak.shown, leak.verdict) == (None, "too few to say: 9 chunks, 3 projects", "-")
    unasked = audit(report, "answer in evidence-free chunks")
    assert (unasked.shown, unasked.verdict) == ("not asked", "-")
    assert audit(report, "never").verdict == "ok"
    # One chunk each: all are at one place, however many there are.
    rows = [labelled(f"t{n}", f"p{n % 4}", [n % 3 == 0]) for n in range(100)]
    one = audit(check(write(tmp_path / "one", rows)), "position leak: evidence")
    assert one.shown == "undefined (one class, or one place): 100 chunks, 4 projects"


def test_two_projects_have_no_interval_and_their_leak_is_warned_about(tmp_path: Path) -> None:
    rows = [labelled(f"t{n}", f"p{n % 2}", [False, False, True]) for n in range(60)]
    two = audit(check(write(tmp_path / "two", rows), test_fraction=0.0), "position leak: evidence")
    assert (two.shown, two.verdict) == ("AUROC 1.000 without an interval, 180 chunks, 2 projects", "warning")


def test_least_median_and_most_are_named(tmp_path: Path) -> None:
    rows = [labelled(f"t{n}", f"p{n}", [True, *[False] * n]) for n in range(4)]
    report = check(write(tmp_path / "c", rows))
    assert audit(report, "chunks a trajectory").shown == "min 1, median 2.5, max 4"


def test_unknown_labels_are_counted(tmp_path: Path) -> None:
    rows = [labelled(f"t{p}", f"p{p}", [True, None, False, None]) for p in range(4)]
    report = check(write(tmp_path / "c", rows))
    assert audit(report, "unknown evidence labels").value == 0.5
    assert audit(report, "unknown exit targets").value == 1.0


def test_the_report_is_json_and_a_page_without_links(tmp_path: Path) -> None:
    report = check(shuffled_corpus(tmp_path / "c", "{}", questions=20))
    assert json.loads(json.dumps(as_json(report), allow_nan=False))["n_problems"] == 0
    write_html(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for title in ("Position of evidence", "Exit index", "Chunks per trajectory", "Chunks with evidence by project"):
        assert f"<!-- {title}" in page
    assert "<script" not in page
    assert 'src="http' not in page


def test_a_page_of_a_broken_corpus_shows_the_problem_as_text(tmp_path: Path) -> None:
    report = check(write_raw(tmp_path / "c", b'{"type":"<script>alert(1)</script>"}\n', 1))
    write_html(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
