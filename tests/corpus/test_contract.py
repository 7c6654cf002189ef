"""The kappa contract: each refusal has its own message, and none needs a row to be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poimen_exp.corpus import load_manifest
from poimen_exp.corpus.chunking import tokenizer_sha256
from poimen_exp.corpus.contract import Confusion
from poimen_exp.corpus.labels import labels_sha256
from poimen_exp.errors import CorpusError

from .support import ByteCodec, document, open_at, question, three_projects, write

# 90 of 100 agree: po = 0.9; labeler 1 has 45 positives, labeler 2 has 45: pe = 0.45^2 + 0.55^2 = 0.505;
# kappa = (0.9 - 0.505) / 0.495 = 0.79798.
CONFUSION = {"pp": 40, "pn": 5, "np": 5, "nn": 50}
KAPPA = 0.798
AGREEMENT: dict[str, Any] = {
    "design": "independent_blind", "labelers": ["ann", "bob"], "confusion": CONFUSION, "n_units": 100, "kappa": KAPPA,
    "n_trajectories": 20, "n_projects": 5, "labels_sha256": "0" * 64, "chunk_tokens": 40,
    "tokenizer_sha256": tokenizer_sha256(ByteCodec()),
}  # fmt: skip


def labels(gate: str, **changes: Any) -> dict[str, Any]:
    block = {key: value for key, value in (AGREEMENT | changes).items() if value != "absent"}
    both = {one: {"origin": "labeled", "agreement": AGREEMENT} for one in ("update", "exit")}
    return both | {gate: {"origin": "labeled", "agreement": block}}


def manifest_with(tmp_path: Path, value: Any, **more: Any) -> Path:
    """A manifest whose file is not there: whatever is refused is refused before any row is read."""
    content = {
        "schema": "poimen.manifest/1", "corpus_id": "c",
        "files": [{"path": "gone.jsonl", "sha256": "0" * 64, "records": 1}], "labels": value,
    } | more  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(content, indent=1))
    return tmp_path


def test_kappa_by_hand() -> None:
    assert Confusion(**CONFUSION).kappa == pytest.approx(0.797980, abs=1e-6)


@pytest.mark.parametrize("cells", [(0, 0, 3, 9), (3, 0, 9, 0), (0, 3, 0, 9), (3, 9, 0, 0), (5, 0, 0, 0), (0, 0, 0, 0)])
def test_kappa_of_one_class_is_undefined_never_one(cells: tuple[int, int, int, int]) -> None:
    assert Confusion(*cells).kappa is None


def test_a_good_block_is_measured(tmp_path: Path) -> None:
    assert load_manifest(manifest_with(tmp_path, labels("update"))).label_status == "measured"


def test_the_weaker_gate_decides_the_status(tmp_path: Path) -> None:
    value = labels("update") | {"exit": {"origin": "constructed"}}
    assert load_manifest(manifest_with(tmp_path, value)).label_status == "measured"


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"kappa": "absent"}, "kappa: missing"),
    ({"kappa": None}, "kappa: got null"),
    ({"kappa": float("nan")}, "kappa: got NaN"),
    ({"kappa": float("inf")}, "kappa: got inf, out of range"),
    ({"kappa": 1.2}, "kappa: got 1.2, out of range"),
    ({"kappa": -1.2}, "kappa: got -1.2, out of range"),
    ({"kappa": True}, "kappa: got True, expected a number"),
    ({"kappa": "0.8"}, "kappa: got '0.8', expected a number"),
    ({"kappa": 0.81}, "kappa: got 0.81, but confusion gives 0.7980"),
    ({"design": "reviewed"}, "design: got 'reviewed'"),
    ({"design": "absent"}, "design: got None"),
    ({"labelers": ["ann", " Ann"]}, "expected two different labelers"),
    ({"labelers": ["ann"]}, "expected the names of the two labelers"),
    ({"confusion": CONFUSION | {"pp": -1}}, "expected counts pp, pn, np and nn"),
    ({"confusion": {"pp": 40}}, "expected counts pp, pn, np and nn"),
    ({"n_units": 99}, "n_units: got 99, expected 100, the sum of confusion"),
    ({"confusion": {"pp": 100, "pn": 0, "np": 0, "nn": 0}, "kappa": 1.0}, "zero marginal"),
    ({"confusion": {"pp": 50, "pn": 0, "np": 50, "nn": 0}, "kappa": 0.0}, "zero marginal"),
    # 29 positives of labeler 2: po = 0.99, pe = 0.3 * 0.29 + 0.7 * 0.71 = 0.584, kappa = 0.97596
    (
        {"confusion": {"pp": 29, "pn": 1, "np": 0, "nn": 70}, "kappa": 0.976},
        "30 and 29 positives, expected at least 30",
    ),
    ({"n_projects": 2}, "n_projects: got 2, expected at least 3"),
    ({"n_trajectories": 4}, "n_trajectories: got 4, expected a count not below n_projects"),
    ({"labels_sha256": "absent"}, "labels_sha256: got None"),
    ({"labels_sha256": "A" * 64}, "expected 64 lower-case hex digits"),
    ({"chunk_tokens": "absent"}, "chunk_tokens: missing"),
    ({"tokenizer_sha256": "absent"}, "tokenizer_sha256: missing"),
    ({"chunk_tokens": 0}, "chunk_tokens: got 0"),
    # 15 + 20 and 15 + 20 positives of 100: po = 0.6, pe = 0.35^2 + 0.65^2 = 0.545, kappa = 0.12088
    ({"confusion": {"pp": 15, "pn": 20, "np": 20, "nn": 45}, "kappa": 0.1209}, "0.121 is below corpus.min_kappa = 0.6"),
]


@pytest.mark.parametrize("gate", ["update", "exit"])
@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_a_bad_block_is_refused_with_its_own_message(
    tmp_path: Path, gate: str, changes: dict[str, Any], message: str
) -> None:
    manifest_with(tmp_path, labels(gate, **changes))
    with pytest.raises(CorpusError) as error:
        load_manifest(tmp_path)
    assert message in str(error.value)
    assert f"labels.{gate}.agreement" in str(error.value)


def test_the_messages_of_different_faults_differ() -> None:
    assert len({message for _, message in REFUSALS}) >= 20


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "labels.update: got None, expected an object; both update and exit are needed"),
        ({"update": {"origin": "constructed"}}, "labels.exit: got None"),
        ({"update": {"origin": "guessed"}, "exit": {}}, "labels.update.origin: got 'guessed'"),
        ({"update": {"origin": "labeled"}, "exit": {}}, "labels.update.agreement: got None; labels by labelers need"),
    ],
)
def test_missing_blocks_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        load_manifest(manifest_with(tmp_path, value))


def test_a_refusal_names_the_line_of_the_value(tmp_path: Path) -> None:
    folder = manifest_with(tmp_path, labels("exit", kappa=None))
    text = (folder / "manifest.json").read_text().split("\n")
    line = next(n for n, one in enumerate(text, 1) if '"kappa": null' in one)
    with pytest.raises(CorpusError, match=rf"manifest\.json:{line}: labels\.exit\.agreement\.kappa"):
        load_manifest(folder)


def test_allow_unmeasured_lets_labels_pass_and_says_so(tmp_path: Path) -> None:
    manifest = load_manifest(manifest_with(tmp_path, labels("exit", kappa=None)), allow_unmeasured=True)
    assert manifest.label_status == "unmeasured"
    assert "kappa: got null" in manifest.unmeasured[0]


def test_another_chunking_is_refused_before_any_row_is_read(tmp_path: Path) -> None:
    manifest_with(tmp_path, labels("update", chunk_tokens=41))
    with pytest.raises(CorpusError, match=r"measured on chunks of 41 tokens, this run has corpus.chunk_tokens = 40"):
        open_at(tmp_path)
    manifest_with(tmp_path, labels("update", tokenizer_sha256="1" * 64))
    with pytest.raises(CorpusError, match=r"measured on chunks by tokenizer 1111"):
        open_at(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "poimen.manifest/2"}, "schema: got 'poimen.manifest/2'"),
        ({"corpus_id": ""}, "corpus_id: got ''"),
        ({"files": []}, "files: got"),
        ({"files": [{"path": "../x.jsonl", "sha256": "0" * 64, "records": 1}]}, "inside the corpus folder"),
        ({"files": [{"path": "/x.jsonl", "sha256": "0" * 64, "records": 1}]}, "inside the corpus folder"),
        ({"files": [{"path": "x.txt", "sha256": "0" * 64, "records": 1}]}, r"expected a .jsonl or .jsonl.gz"),
        ({"files": [{"path": "x.jsonl", "sha256": "00", "records": 1}]}, "expected 64 lower-case hex digits"),
        ({"files": [{"path": "x.jsonl", "sha256": "0" * 64, "records": True}]}, "expected the number of its rows"),
        ({"licenses": "MIT"}, "expected a list of strings"),
        ({"dropped": {"a": "b"}}, "expected an object of reason"),
    ],
)
def test_a_malformed_manifest_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        load_manifest(manifest_with(tmp_path, labels("update"), **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{\n\n nope", r"manifest\.json:3: not JSON"),
        (b"[]", r"got list, expected an object"),
        (b'{"schema": "poimen.manifest/1",\n"schema": "x"}', "key 'schema' occurs twice"),
        (b'{"schema": "\xff"}', "not UTF-8"),
        (b'{"corpus_id": "\\ud800"}', "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_manifest_that_is_not_json_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CorpusError, match=message):
        load_manifest(tmp_path)


def test_a_missing_manifest_is_refused_with_what_a_corpus_is(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"manifest\.json: not found; a corpus is a folder"):
        load_manifest(tmp_path)


def measured_corpus(tmp_path: Path, rows: list[dict[str, Any]], update_hash: str, exit_hash: str, **more: Any) -> Path:
    value = {
        "update": {"origin": "labeled", "agreement": AGREEMENT | {"labels_sha256": update_hash} | more},
        "exit": {"origin": "labeled", "agreement": AGREEMENT | {"labels_sha256": exit_hash} | more},
    }
    return write(tmp_path / "c", rows, labels=value)


UPDATE = labels_sha256((f"t{p}", (False, True, False)) for p in range(3))
EXIT = UPDATE  # the only evidence is where reading stops


def test_labels_with_the_right_hash_are_measured(tmp_path: Path) -> None:
    corpus = open_at(measured_corpus(tmp_path, three_projects(), UPDATE, EXIT))
    assert corpus.label_status == "measured"


@pytest.mark.parametrize("gate", ["update", "exit"])
def test_labels_that_changed_after_measuring_are_refused(tmp_path: Path, gate: str) -> None:
    rows = three_projects()
    if gate == "update":
        rows[2]["chunks"][0]["evidence"] = True
    else:
        rows[2]["exit_index"] = 2
    with pytest.raises(CorpusError, match=rf"labels\.{gate}\.agreement\.labels_sha256: .* changed after kappa"):
        open_at(measured_corpus(tmp_path, rows, UPDATE, EXIT))
    corpus = open_at(tmp_path / "c", allow_unmeasured=True)
    assert corpus.label_status == "unmeasured"


def test_first_form_labels_are_hashed_after_chunking(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for p in range(3):
        rows.append(document(f"d{p}", f"p{p}", [f"{p}" + "a" * 30, "b" * 30]))  # 31 + 30 bytes: two chunks of 40
        rows.append(question(f"t{p}", f"d{p}", [("u1", 0, 5)]))
    update = labels_sha256((f"t{p}", (False, True)) for p in range(3))
    assert open_at(measured_corpus(tmp_path, rows, update, update)).label_status == "measured"
    open_chunking = AGREEMENT | {"labels_sha256": update, "chunk_tokens": None}
    blocks = {gate: {"origin": "labeled", "agreement": open_chunking} for gate in ("update", "exit")}
    write(tmp_path / "c", rows, overwrite=True, labels=blocks)
    with pytest.raises(CorpusError, match="got null, but this corpus has documents that are cut here"):
        open_at(tmp_path / "c")


def test_own_chunks_may_leave_the_chunking_open(tmp_path: Path) -> None:
    folder = measured_corpus(tmp_path, three_projects(), UPDATE, EXIT, chunk_tokens=None, tokenizer_sha256=None)
    assert open_at(folder, chunk_tokens=999).label_status == "measured"
