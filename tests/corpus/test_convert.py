"""Converters, on a few rows in the form and with the defects of the public sets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from poimen_exp.corpus.convert import Conversion, hotpotqa, locomo, mapped, musique, qmsum, write_conversion
from poimen_exp.corpus.convert.locomo import turn_ids
from poimen_exp.corpus.convert.pools import Paragraph, PoolQuestion, assign_projects, pooled_records
from poimen_exp.errors import CorpusError, Refused

from .support import open_at


def by_type(conversion: Conversion) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Documents and trajectories by id."""
    rows = [json.loads(json.dumps(row)) for row in conversion.records]
    documents = {row["document_id"]: row for row in rows if row["type"] == "document"}
    return documents, {row["trajectory_id"]: row for row in rows if row["type"] == "trajectory"}


def evidence_texts(documents: dict[str, dict[str, Any]], trajectory: dict[str, Any]) -> list[str]:
    units = {unit["unit_id"]: unit["text"] for unit in documents[trajectory["document_id"]]["units"]}
    return [units[span["unit_id"]][span["start"] : span["end"]] for span in trajectory["evidence"]]


def sentence(topic: str) -> str:
    return f"The {topic} was first described by a group of twelve people in a small northern town."


def hotpot_row(name: str, gold: str, others: list[str], answer: str = "blue") -> dict[str, Any]:
    context = [[title, [f"{title} stands here.", " " + sentence(title)]] for title in [gold, *others]]
    return {
        "_id": name, "question": f"What of {name}?", "answer": answer, "supporting_facts": [[gold, 1]],
        "context": context,
    }  # fmt: skip


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


HOTPOT = [hotpot_row(f"q{n}", f"Gold {n % 5}", [f"Other {n} {k}" for k in range(3)]) for n in range(10)]


def test_hotpotqa_evidence_is_the_supporting_sentence(tmp_path: Path) -> None:
    documents, questions = by_type(hotpotqa.convert(write_lines(tmp_path / "h.json", HOTPOT), tokens=200, projects=3))
    assert len(questions) == 10
    for name, row in questions.items():
        assert evidence_texts(documents, row) == [sentence(f"Gold {int(name[1:]) % 5}")]
        headers = [unit["header"] for unit in documents[name]["units"]]
        assert f"Gold {int(name[1:]) % 5}" in headers


def test_questions_that_share_gold_are_one_project_and_documents_stay_inside_it(tmp_path: Path) -> None:
    documents, _ = by_type(hotpotqa.convert(write_lines(tmp_path / "h.json", HOTPOT), tokens=400, projects=3))
    project = {name: row["project"] for name, row in documents.items()}
    assert all(project[f"q{n}"] == project[f"q{n + 5}"] for n in range(5))
    assert len(set(project.values())) == 3
    for name, row in documents.items():
        for unit in row["units"]:
            owners = {
                f"q{n}" for n in range(10) if unit["header"] in (f"Gold {n % 5}", *[f"Other {n} {k}" for k in range(3)])
            }
            assert {project[owner] for owner in owners} == {project[name]}


def test_pooled_documents_reach_their_size_and_do_not_pass_it(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "h.json", HOTPOT)
    sizes = []
    for row in by_type(hotpotqa.convert(path, tokens=200, projects=2))[0].values():
        sizes.append(sum(1.3 * len(f"{u['header']} {u['text']}".split()) for u in row["units"]))
    assert max(sizes) <= 200
    assert min(sizes) > 150  # a paragraph has about 30


def test_the_order_is_the_questions_own_and_does_not_depend_on_the_rows(tmp_path: Path) -> None:
    one = by_type(hotpotqa.convert(write_lines(tmp_path / "a.json", HOTPOT), tokens=150, projects=3))[0]
    two = by_type(hotpotqa.convert(write_lines(tmp_path / "b.json", HOTPOT[::-1]), tokens=150, projects=3))[0]
    assert one == two
    places = {next(i for i, u in enumerate(row["units"]) if u["header"].startswith("Gold")) for row in one.values()}
    assert len(places) > 1


def test_questions_of_one_project_order_the_same_paragraphs_differently(tmp_path: Path) -> None:
    documents, _ = by_type(hotpotqa.convert(write_lines(tmp_path / "h.json", HOTPOT), tokens=5000, projects=1))
    orders = [
        [u["header"] for u in documents[name]["units"] if u["header"].startswith("Other")] for name in ("q0", "q1")
    ]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_further_documents_of_a_question_have_its_gold_among_other_distractors(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "h.json", HOTPOT)
    alone, _ = by_type(hotpotqa.convert(path, tokens=200, projects=2))
    documents, questions = by_type(hotpotqa.convert(path, tokens=200, projects=2, documents=3))
    assert len(questions) == 30
    assert {name: row for name, row in documents.items() if name in alone} == alone
    for n in range(10):
        family = [f"q{n}", f"q{n}-2", f"q{n}-3"]
        assert all(evidence_texts(documents, questions[name]) == [sentence(f"Gold {n % 5}")] for name in family)
        assert len({questions[name]["question"] for name in family}) == 1
        assert len({documents[name]["project"] for name in family}) == 1
        headers = [tuple(unit["header"] for unit in documents[name]["units"]) for name in family]
        assert len({frozenset(row) for row in headers}) > 1
        assert len(set(headers)) == 3
        assert all(len(set(row)) == len(row) for row in headers)


def test_a_document_that_equals_another_of_its_question_is_counted(tmp_path: Path) -> None:
    rows = [hotpot_row("q0", "Gold 0", [])]  # one paragraph has one order
    conversion = hotpotqa.convert(write_lines(tmp_path / "h.json", rows), tokens=200, documents=4)
    assert list(by_type(conversion)[1]) == ["q0"]
    assert conversion.dropped == {"document_equals_another_of_its_question": 3}


def test_a_further_document_with_the_id_of_a_question_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "h.json", [hotpot_row("q", "Gold 0", ["a"]), hotpot_row("q-2", "Gold 1", ["b"])])
    assert list(by_type(hotpotqa.convert(path))[1]) == ["q", "q-2"]
    with pytest.raises(CorpusError, match="documents 2: 'q-2' is the id of a question too"):
        list(hotpotqa.convert(path, documents=2).records)


def test_a_distractor_that_spells_a_short_answer_is_not_added(tmp_path: Path) -> None:
    rows = [hotpot_row("q0", "Gold 0", [], answer="Nile"), hotpot_row("q1", "Gold 1", ["Nile"]), *HOTPOT[2:5]]
    documents, _ = by_type(hotpotqa.convert(write_lines(tmp_path / "h.json", rows), tokens=5000, projects=1))
    assert "Nile" not in {unit["header"] for unit in documents["q0"]["units"]}
    assert "Nile" in {unit["header"] for unit in documents["q2"]["units"]}
    rows[0] |= {"answer": "Nil"}  # a part of a word is not the answer
    documents, _ = by_type(hotpotqa.convert(write_lines(tmp_path / "h.json", rows), tokens=5000, projects=1))
    assert "Nile" in {unit["header"] for unit in documents["q0"]["units"]}


def test_gold_of_another_project_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [hotpot_row("q0", "Gold 0", ["Gold 1"]), hotpot_row("q1", "Gold 1", [])]
    conversion = hotpotqa.convert(write_lines(tmp_path / "h.json", rows), tokens=5000, projects=2)
    documents, _ = by_type(conversion)
    assert [unit["header"] for unit in documents["q0"]["units"]] == ["Gold 0"]
    assert conversion.dropped == {"paragraph_is_gold_of_another_project": 1}


def test_hotpotqa_rows_that_cannot_be_used_are_counted_or_refused(tmp_path: Path) -> None:
    lost = hotpot_row("q9", "Gold 9", []) | {"supporting_facts": [["Gold 9", 7]]}
    conversion = hotpotqa.convert(write_lines(tmp_path / "h.json", [HOTPOT[0], HOTPOT[0], lost]))
    assert list(by_type(conversion)[1]) == ["q0"]
    assert conversion.dropped == {"duplicate_id": 1, "supporting_fact_not_in_context": 1}
    with pytest.raises(CorpusError, match=r"h\.json:2: answer: got None, expected str"):
        hotpotqa.convert(write_lines(tmp_path / "h.json", [HOTPOT[0], {"_id": "x"}]))


def test_a_json_array_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text(json.dumps(HOTPOT, indent=1))
    assert len(by_type(hotpotqa.convert(tmp_path / "h.json"))[1]) == 10


def test_gold_is_shared_through_chains_of_questions() -> None:
    def one(name: str, *texts: str) -> PoolQuestion:
        return PoolQuestion(name, "?", ("a",), tuple(Paragraph(text, text, ((0, len(text)),)) for text in texts))

    projects = assign_projects([one("a", "x"), one("b", "x", "y"), one("c", "y"), one("d", "z")], 5, "p")
    assert projects["a"] == projects["b"] == projects["c"] != projects["d"]


def test_an_equal_evidence_text_in_other_paragraphs_is_shared_gold() -> None:
    def one(name: str, before: str) -> PoolQuestion:
        text = f"{before} {sentence('Nile')}"
        return PoolQuestion(name, "?", ("a",), (Paragraph(before, text, ((len(before) + 1, len(text)),)),))

    projects = assign_projects([one("a", "One."), one("b", "Two.")], 2, "p")
    assert projects["a"] == projects["b"]


def pooled(questions: list[PoolQuestion], tokens: float, documents: int = 1) -> dict[str, list[str]]:
    """Texts of each document, sorted; one project, every paragraph costs 10."""
    records = list(pooled_records(questions, 1, tokens, lambda _: 10.0, "p", Counter(), documents))
    found = [row for row in records if row["type"] == "document"]
    return {row["document_id"]: sorted(unit["text"] for unit in row["units"]) for row in found}


def pool_question(name: str, *others: Paragraph, answer: str = "no") -> PoolQuestion:
    return PoolQuestion(name, "?", (answer,), (Paragraph(f"of {name}", f"gold {name}", ((0, 4),)), *others))


def test_a_document_may_reach_its_size_exactly() -> None:
    assert [len(texts) for texts in pooled([pool_question(name) for name in "abc"], 20).values()] == [2, 2, 2]


def test_further_documents_do_not_keep_the_questions_own_distractors() -> None:
    asked = [pool_question("a", Paragraph("t", "own")), pool_question("b")]
    # The first keeps what came with the question whatever its size; no draw fits beside the gold.
    assert pooled(asked, 10, documents=2) == {
        "a": ["gold a", "own"], "a-2": ["gold a"], "b": ["gold b"],
    }  # fmt: skip


def test_another_version_of_a_gold_paragraph_is_no_distractor() -> None:
    asked = [pool_question("a"), pool_question("b", Paragraph("OF A", "other version"))]
    assert pooled(asked, 100) == {"a": ["gold a", "gold b"], "b": ["gold a", "gold b", "other version"]}


@pytest.mark.parametrize(("words", "drawn"), [(6, False), (7, True)])
def test_an_answer_of_six_words_is_short(words: int, drawn: bool) -> None:
    answer = " ".join("abcdefg"[:words])
    asked = [pool_question("x", answer=answer), pool_question("y", Paragraph("t", f"it is {answer}"))]
    assert (f"it is {answer}" in pooled(asked, 100)["x"]) == drawn


def musique_row(name: str, gold: list[str], **more: Any) -> dict[str, Any]:
    paragraphs = [
        {"idx": n, "title": "Same title", "paragraph_text": f"{text} {sentence(text)}", "is_supporting": text in gold}
        for n, text in enumerate([*gold, f"{name} x", f"{name} y"])
    ]
    return {
        "id": name, "question": "Q?", "answer": "A", "answer_aliases": ["B", "A"], "answerable": True,
        "paragraphs": paragraphs,
    } | more  # fmt: skip


def test_musique_evidence_is_whole_paragraphs_matched_by_place_not_title(tmp_path: Path) -> None:
    rows = [
        musique_row("q0", ["one", "two"]),
        musique_row("q1", ["three"]),
        musique_row("q2", ["four"], answerable=False),
    ]
    conversion = musique.convert(write_lines(tmp_path / "m.json", rows), tokens=1000, projects=2)
    documents, questions = by_type(conversion)
    assert sorted(evidence_texts(documents, questions["q0"])) == [f"{t} {sentence(t)}" for t in ("one", "two")]
    assert questions["q0"]["answers"] == ["A", "B"]
    assert conversion.dropped == {"not_answerable": 1}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["D8:6; D9:17"], ["D8:6", "D9:17"]),
        (["D9:1 D4:4 D4:6"], ["D9:1", "D4:4", "D4:6"]),
        (["D:11:26"], ["D11:26"]),
        (["D30:05"], ["D30:5"]),
        (["D1:3", "D1:3"], ["D1:3"]),
        (["D"], None),
        (["D1:3", "see above"], None),
        ([3], None),
    ],
)
def test_locomo_ids_are_repaired(entries: list[Any], expected: list[str] | None) -> None:
    assert turn_ids(entries) == expected


LOCOMO = [
    {
        "sample_id": "conv-1",
        "conversation": {
            "speaker_a": "Ann", "speaker_b": "Bob",
            "session_2_date_time": "9 May", "session_2": [{"speaker": "Ann", "dia_id": "D2:1", "text": "Bye."}],
            "session_1_date_time": "8 May",
            "session_1": [
                {"speaker": "Ann", "dia_id": "D1:1", "text": "Look.", "blip_caption": "a red kite", "query": "kite"},
                {"speaker": "Bob", "dia_id": "D1:2", "text": "Nice!"},
            ],
            "session_3_date_time": "no turns that day",
        },
        "qa": [
            {"question": "What colour?", "answer": 2022, "evidence": ["D1:1"], "category": 1},
            {"question": "What trap?", "evidence": ["D1:2"], "category": 5, "adversarial_answer": "x"},
            {"question": "What  colour?", "answer": "red", "evidence": ["D1:1"], "category": 1},
            {"question": "Which?", "evidence": ["D2:1"], "category": 5},
            {"question": "Which?", "answer": "this", "evidence": ["D2:1"], "category": 2},
            {"question": "Empty?", "answer": "a", "evidence": [], "category": 1},
            {"question": "Bad?", "answer": "a", "evidence": ["D"], "category": 1},
            {"question": "Gone?", "answer": "a", "evidence": ["D10:19"], "category": 1},
        ],
    }
]  # fmt: skip


def test_locomo_by_its_rules(tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text(json.dumps(LOCOMO))
    conversion = locomo.convert(tmp_path / "l.json")
    documents, questions = by_type(conversion)
    assert documents["conv-1"]["units"] == [
        {"unit_id": "D1:1", "text": "Ann: Look. [image: a red kite]", "header": "[Session 1, 8 May]"},
        {"unit_id": "D1:2", "text": "Bob: Nice!", "header": "[Session 1, 8 May]"},
        {"unit_id": "D2:1", "text": "Ann: Bye.", "header": "[Session 2, 9 May]"},
    ]
    assert {name: (row["answers"], evidence_texts(documents, row)) for name, row in questions.items()} == {
        "conv-1-q0": (["2022"], ["Ann: Look. [image: a red kite]"]),
        "conv-1-q1": (None, []),  # adversarial: the listed turn is the trap
        "conv-1-q4": (["this"], ["Ann: Bye."]),  # the answerable one of two equal questions
    }
    assert conversion.dropped == {
        "duplicate_question": 2, "answerable_without_evidence": 1, "evidence_id_malformed": 1,
        "evidence_id_not_in_conversation": 1,
    }  # fmt: skip
    assert "non-commercial" in conversion.licenses[0]


@pytest.mark.parametrize(
    ("meeting", "expected"),
    [("ES2004a", "ES2004"), ("ES2004d", "ES2004"), ("Bmr005", "Bmr"), ("covid_4", "covid"),
     ("education_13", "education"), ("Board meeting", "Board meeting")],
)  # fmt: skip
def test_a_meeting_series_is_one_project(meeting: str, expected: str) -> None:
    assert qmsum.series(meeting) == expected


def test_qmsum_ranges_become_turns(tmp_path: Path) -> None:
    turns = [{"speaker": "PM", "content": text} for text in ("Hello .", "", "Buttons .", "Bye .")]
    query = {"query": "Buttons?", "answer": "Yes.", "relevant_text_span": [["1", "2"]]}
    value = {
        "meeting_transcripts": turns, "general_query_list": [{"query": "Summarize", "answer": "x"}],
        "specific_query_list": [query, query, query | {"query": "Far?", "relevant_text_span": [["3", "4"]]}],
    }  # fmt: skip
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "ES2004a.json").write_text(json.dumps(value))
    conversion = qmsum.convert(tmp_path)
    documents, questions = by_type(conversion)
    assert [unit["unit_id"] for unit in documents["ES2004a"]["units"]] == ["t0", "t2", "t3"]
    assert evidence_texts(documents, questions["ES2004a-q0"]) == ["PM: Buttons ."]
    assert conversion.dropped == {"whole_meeting_query": 1, "duplicate_query": 1, "range_not_in_meeting": 1}


def test_own_lines_with_chunks_by_a_map(tmp_path: Path) -> None:
    rows = [
        {"id": n, "repo": f"r{n % 3}", "q": {"text": "Who?"}, "gold": "Ann",
         "segments": [{"body": f"{n} a", "hit": None}, {"body": "b", "hit": n == 0}]}
        for n in range(4)
    ]  # fmt: skip
    path = write_lines(tmp_path / "own.jsonl", rows)
    mapping = mapped.parse_map(
        ["trajectory_id=id", "project=repo", "question=q.text", "answers=gold", "chunks=segments", "chunk_text=body",
         "chunk_evidence=hit"]
    )  # fmt: skip
    write_conversion(mapped.convert(path, mapping), tmp_path / "c")
    tasks = {t.task_id: t for s in ("train", "val", "test") for t in open_at(tmp_path / "c").split(s)}  # type: ignore[arg-type]
    assert tasks["0"].evidence == (None, True)
    assert tasks["3"].evidence == (None, False)
    assert tasks["1"].answers == ("Ann",)


def test_own_lines_with_units_by_a_map(tmp_path: Path) -> None:
    rows = [{"id": "a", "p": "p", "q": "?", "log": [{"t": "x y", "d": "3 May", "e": True}, {"t": "z", "e": False}]}]
    mapping = mapped.parse_map(
        ["trajectory_id=id", "project=p", "question=q", "units=log", "unit_text=t", "unit_header=d", "unit_evidence=e"]
    )
    documents, questions = by_type(mapped.convert(write_lines(tmp_path / "own.jsonl", rows), mapping))
    assert documents["a"]["units"][0] == {"unit_id": "u0", "text": "x y", "header": "3 May"}
    assert evidence_texts(documents, questions["a"]) == ["x y"]
    assert questions["a"]["answers"] is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["trajectory=id"], "expected field=path with a field out of"),
        (["trajectory_id="], "expected field=path"),
        (["trajectory_id=a", "project=b", "question=c"], "one of chunks or units"),
    ],
)
def test_a_map_that_cannot_work_is_refused(entries: list[str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        mapped.parse_map(entries)


def test_a_path_that_leads_nowhere_is_refused_with_its_line(tmp_path: Path) -> None:
    mapping = mapped.parse_map(["trajectory_id=id", "project=p", "question=q", "chunks=c"])
    path = write_lines(tmp_path / "own.jsonl", [{"id": "a", "p": "p", "q": "?", "c": ["x"]}, {"id": "b"}])
    with pytest.raises(CorpusError, match=r"own\.jsonl:2: project: got nothing at 'p', expected text"):
        list(mapped.convert(path, mapping).records)
    with pytest.raises(CorpusError, match=r"own\.jsonl:1: answers: got nothing at 'gold', expected an answer, a list"):
        list(mapped.convert(path, {**mapping, "answers": "gold"}).records)
    with pytest.raises(
        CorpusError, match=r"own\.jsonl:1: exit_index: got nothing at 'stop', expected an index or null"
    ):
        list(mapped.convert(path, {**mapping, "exit_index": "stop"}).records)


def test_an_input_without_rows_makes_no_corpus(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "own.jsonl", [])
    mapping = mapped.parse_map(["trajectory_id=id", "project=p", "question=q", "chunks=c"])
    with pytest.raises(Refused, match=r"corpus\.jsonl: no row to write: the input has none$"):
        write_conversion(mapped.convert(path, mapping), tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []
