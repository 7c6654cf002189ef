from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
from sklearn.metrics import roc_auc_score

from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.types import ExitTarget, ReadingTask
from poimen_exp.quickstart.corpus import DOCUMENTS, PROJECTS, make_corpus
from poimen_exp.quickstart.logs import (
    LogDocument,
    Shape,
    ask,
    asked_pairs,
    log_note,
    make_document,
    reading_tasks,
    sample_tasks,
    single_weights,
)
from poimen_exp.quickstart.words import SERVICES

from .conftest import ASSETS


def documents(count: int) -> list[LogDocument]:
    rng = random.Random(5)
    return [make_document(rng.sample(SERVICES, 3), Shape(), rng) for _ in range(count)]


def position_auroc(tasks: Sequence[ReadingTask]) -> dict[str, float]:
    """How well the place of a chunk tells its label: 0.5 not at all, 0 or 1 perfectly."""
    turns = [(task, index) for task in tasks for index in range(len(task.chunks))]
    labels = {
        "update": [bool(task.evidence[index]) for task, index in turns],
        "exit": [index == task.exit.index for task, index in turns],
    }
    places = {
        "index": [float(index) for _, index in turns],
        "relative": [index / task.last_index for task, index in turns],
    }
    return {f"{a}/{b}": float(roc_auc_score(labels[a], places[b])) for a in labels for b in places}


def test_the_shipped_corpus_is_what_its_seed_makes(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    for name in ("manifest.json", "corpus.jsonl"):
        assert (tmp_path / name).read_bytes() == (ASSETS / "corpus" / name).read_bytes()


def test_another_seed_makes_another_corpus(tmp_path: Path) -> None:
    make_corpus(tmp_path, seed=8)
    assert (tmp_path / "corpus.jsonl").read_bytes() != (ASSETS / "corpus" / "corpus.jsonl").read_bytes()


def test_position_predicts_neither_label_in_the_shipped_corpus(tasks: list[ReadingTask]) -> None:
    assert len(tasks) == PROJECTS * DOCUMENTS * Shape().questions == 360
    for name, auroc in position_auroc(tasks).items():
        assert 0.4 <= auroc <= 0.6, name


def test_position_predicts_neither_label_in_a_large_sample() -> None:
    sample = [task for number, one in enumerate(documents(600)) for task in reading_tasks(one, str(number), "p", 5)]
    for name, auroc in position_auroc(sample).items():
        assert 0.42 <= auroc <= 0.58, name


def test_single_evidence_leans_early_by_half_of_what_would_make_exits_flat() -> None:
    # 4 chunks: 6 pairs of chunks, whose later one is 0, 1, 2, 3 in 0, 1, 2, 3 of them. Flat exits need
    # 0.8 / 4 - 0.3 * (0, 1, 2, 3) / 6 = 0.2, 0.15, 0.1, 0.05; uniform is 0.125 each; the mean of both:
    assert single_weights(4) == pytest.approx([0.1625, 0.1375, 0.1125, 0.0875])


def test_every_kind_of_question_and_every_place_of_evidence_is_in_the_corpus(tasks: list[ReadingTask]) -> None:
    held = Counter(sum(map(bool, task.evidence)) for task in tasks)
    assert set(held) == {0, 1, 2}
    assert min(held.values()) >= 50
    exits = Counter(task.exit.index for task in tasks)
    assert set(exits) == {None, 0, 1, 2, 3, 4, 5}
    lines = Counter(i % 5 for one in documents(20) for question in one.questions for i in question.evidence)
    assert set(lines) == {0, 1, 2, 3, 4}


def test_two_facts_lie_in_two_chunks() -> None:
    doubles = [q for one in documents(50) for q in one.questions if q.kind == "double"]
    assert len(doubles) > 50
    assert all(len({i // 5 for i in q.evidence}) == 2 for q in doubles)


def test_evidence_lines_hold_the_asked_pairs_and_no_other_line_does() -> None:
    for one in documents(20):
        for question in one.questions:
            asked = set(asked_pairs(question.text))
            holding = {i for i, entry in enumerate(one.entries) if (entry.service, entry.thing) in asked}
            assert holding == set(question.evidence)
            assert question.kind == "none" or len(asked) == len(holding)


def test_answers_name_the_places_in_the_order_of_the_question() -> None:
    for one in documents(20):
        places = {(entry.service, entry.thing): entry.place for entry in one.entries}
        for question in one.questions:
            if question.kind != "none":
                assert question.answer == " ".join(places[pair] for pair in asked_pairs(question.text))


def test_most_questions_have_lines_that_share_the_service_and_lines_that_share_the_thing() -> None:
    near = []
    for one in documents(20):
        for question in one.questions:
            service, thing = asked_pairs(question.text)[0]
            others = [entry for i, entry in enumerate(one.entries) if i not in question.evidence]
            near.append(any(e.service == service for e in others) and any(e.thing == thing for e in others))
    assert sum(near) / len(near) > 0.8


def test_projects_share_no_service() -> None:
    words: dict[str, set[str]] = {}
    for line in (ASSETS / "corpus" / "corpus.jsonl").read_text().split("\n")[:-1]:
        row = json.loads(line)
        if row["type"] == "document":
            services = {unit["text"].split(" the ")[1].split()[0] for unit in row["units"]}
            words.setdefault(row["project"], set()).update(services)
    assert len(words) == PROJECTS
    assert sum(map(len, words.values())) == len(set().union(*words.values()))


def test_the_loader_cuts_the_chunks_that_the_model_was_trained_on(tasks: list[ReadingTask], codec: HfCodec) -> None:
    for task in tasks:
        assert all(chunk.count("\n") == 4 for chunk in task.chunks)
        assert {len(codec.encode_plain(chunk)) for chunk in task.chunks} == {54}  # 5 x 10 words and 4 line ends


def test_tasks_made_directly_have_the_labels_of_their_lines() -> None:
    document = documents(1)[0]
    question = next(q for q in document.questions if q.kind == "double")
    task = reading_tasks(document, "d", "p", 5)[document.questions.index(question)]
    first, last = (i // 5 for i in question.evidence)
    assert [i for i, label in enumerate(task.evidence) if label] == [first, last]
    assert task.exit == ExitTarget(True, last)
    entry = document.entries[question.evidence[0]]
    assert log_note(task, first) == f"- {entry.service} {entry.thing} {entry.place}"
    assert [i for i in range(len(task.chunks)) if log_note(task, i)] == [first, last]


def test_a_question_asks_for_one_or_two_pairs() -> None:
    assert ask([("mail", "cache")]) == "where is the mail cache ?"
    both = ask([("mail", "cache"), ("shop", "queue")])
    assert both == "where are the mail cache and the shop queue ?"
    assert asked_pairs(both) == [("mail", "cache"), ("shop", "queue")]


def test_samples_go_on_without_end_and_differ() -> None:
    questions = {task.question for task in islice(sample_tasks(Shape(questions=2), random.Random(0)), 100)}
    assert len(questions) > 95
