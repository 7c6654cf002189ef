"""Kappa of two labelers, and the block that opens the loader."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from sklearn.metrics import cohen_kappa_score

from poimen_exp.corpus.agreement import (
    GateAgreement,
    LabelledTrajectory,
    label_hashes,
    manifest_labels,
    measure,
    read_labels,
)
from poimen_exp.corpus.contract import Confusion
from poimen_exp.errors import CorpusError, Refused

from .support import labelled, open_at, write, write_raw


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def label_row(name: str, project: str, evidence: list[bool | None], **more: Any) -> dict[str, Any]:
    return {"trajectory_id": name, "project": project, "evidence": evidence} | more


def one(evidence: list[bool | None], exit_here: list[bool | None], project: str = "p") -> LabelledTrajectory:
    return LabelledTrajectory(project, tuple(evidence), tuple(exit_here))


def test_update_and_exit_confusions_by_hand() -> None:
    first = {"a": one([True, False, None], [False, True, False]), "b": one([True, True, True], [False, False, True])}
    second = {"a": one([True, True, True], [False, True, False]), "b": one([False, True, False], [True, False, False])}
    update, stop = measure(first, second)
    # a: pp, np, skipped; b: pn, pp, pn
    assert update.confusion == Confusion(pp=2, pn=2, np=1, nn=0)
    assert update.skipped == 1
    assert stop.confusion == Confusion(pp=1, pn=1, np=1, nn=3)
    # exit: po = 4/6, pe = (2*2 + 4*4)/36 = 20/36, kappa = (24 - 20)/(36 - 20) = 0.25
    assert stop.kappa == pytest.approx(0.25)
    assert (stop.n_trajectories, stop.n_projects) == (2, 1)


def random_pair(
    seed: int, trajectories: int = 60, projects: int = 6
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rng = random.Random(seed)
    first, second = [], []
    for n in range(trajectories):
        mine = [rng.random() < 0.4 for _ in range(10)]
        theirs = [label if rng.random() < 0.95 else not label for label in mine]
        first.append(label_row(f"t{n}", f"p{n % projects}", mine))
        second.append(label_row(f"t{n}", f"p{n % projects}", theirs))
    return first, second


def test_kappa_is_that_of_scikit_learn(tmp_path: Path) -> None:
    rows, others = random_pair(0)
    first, second = read_labels(lines(tmp_path / "a.jsonl", rows)), read_labels(lines(tmp_path / "b.jsonl", others))
    for result, field in zip(measure(first, second), ("evidence", "exit"), strict=True):
        mine = [label for name in first for label in getattr(first[name], field)]
        theirs = [label for name in first for label in getattr(second[name], field)]
        assert result.kappa == pytest.approx(cohen_kappa_score(mine, theirs), abs=1e-12)
        assert result.low is not None
        assert result.high is not None
        assert result.low < result.kappa < result.high


def test_the_interval_is_over_projects_not_chunks() -> None:
    """Many equal trajectories of one project do not narrow it: three projects, one of which disagrees throughout."""
    good, bad = [True, False, True, False], [False, True, False, True]
    first = {f"{p}-{n}": one(good, good, f"p{p}") for p in range(3) for n in range(200)}
    second = {name: one(bad if name.startswith("2") else good, good, row.project) for name, row in first.items()}
    update, _ = measure(first, second)
    assert update.kappa == pytest.approx(1 / 3)  # po = 2/3, pe = 1/2
    assert (update.low, update.high) == (-1.0, 1.0)  # a resample can be all of one kind


@pytest.mark.parametrize("label", [True, False])
def test_kappa_of_one_class_is_undefined_and_null_in_the_block(label: bool) -> None:
    rows = {f"t{p}": one([label, label], [True, False], f"p{p}") for p in range(3)}
    update, stop = measure(rows, rows)
    assert (update.kappa, update.low, update.high) == (None, None, None)
    assert stop.kappa == 1.0
    block = manifest_labels([update, stop], label_hashes(rows), ("a", "b"), "independent_blind", None)
    assert block["update"]["agreement"]["kappa"] is None
    json.dumps(block, allow_nan=False)


def test_the_block_opens_the_loader_and_only_for_these_labels(tmp_path: Path) -> None:
    rows, others = random_pair(1)
    corpus = [labelled(row["trajectory_id"], row["project"], row["evidence"]) for row in rows]
    path = lines(tmp_path / "corpus_a.jsonl", corpus)  # second-form rows are a labels file too
    first, second = read_labels(path), read_labels(lines(tmp_path / "b.jsonl", others))
    block = manifest_labels(measure(first, second), label_hashes(first), ("ann", "bob"), "independent_blind", None)
    folder = write(tmp_path / "c", corpus, labels=block)
    assert open_at(folder).label_status == "measured"
    corpus[0]["chunks"][0]["evidence"] = not corpus[0]["chunks"][0]["evidence"]
    with pytest.raises(CorpusError, match="changed after kappa was measured"):
        open_at(write(folder, corpus, labels=block, overwrite=True))


def test_without_a_stated_design_the_block_opens_nothing(tmp_path: Path) -> None:
    rows, others = random_pair(2)
    first, second = (read_labels(lines(tmp_path / f"{n}.jsonl", part)) for n, part in enumerate((rows, others)))
    block = manifest_labels(measure(first, second), label_hashes(first), ("a", "b"), "not stated", None)
    corpus = [labelled(row["trajectory_id"], row["project"], row["evidence"]) for row in rows]
    with pytest.raises(CorpusError, match="design: got 'not stated'"):
        open_at(write(tmp_path / "c", corpus, labels=block))


def test_labelers_of_different_chunks_are_refused() -> None:
    with pytest.raises(Refused, match="has 2 chunks of project 'p' in one file and 1 of 'p'"):
        measure({"a": one([True, True], [True, False])}, {"a": one([True], [True])})
    with pytest.raises(Refused, match="no trajectory_id in common"):
        measure({"a": one([True], [True])}, {"b": one([True], [True])})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"trajectory_id":"t","project":"p","evidence":[1]}', r"a\.jsonl:2: Expected `bool \| null`, got `int`"),
        (b'{"trajectory_id":"t","project":"p","evidence":[]}', r"a\.jsonl:2: evidence: got an empty list"),
        (b'{"trajectory_id":"t","project":"p","evidence":[false,true],"exit_index":0}', "still holds evidence"),
        (b'{"trajectory_id":"x","project":"p","evidence":[true]}', r"a\.jsonl:2: trajectory_id 'x' occurs twice"),
        (b"nonsense", r"a\.jsonl:2: "),
    ],
)
def test_a_bad_labels_file_is_refused_with_its_line(tmp_path: Path, line: bytes, message: str) -> None:
    good = json.dumps(label_row("x", "p", [True])).encode() + b"\n"
    write_raw(tmp_path, good + line, 2, "a.jsonl")
    with pytest.raises(CorpusError, match=message):
        read_labels(tmp_path / "a.jsonl")


def test_agreement_is_a_value(tmp_path: Path) -> None:
    rows, others = random_pair(3)
    first, second = (read_labels(lines(tmp_path / f"{n}.jsonl", part)) for n, part in enumerate((rows, others)))
    assert measure(first, second) == measure(first, second)
    assert isinstance(measure(first, second)[0], GateAgreement)
