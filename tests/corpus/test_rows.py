"""Hostile files: each is accepted, or refused with file and physical line."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from poimen_exp.corpus import index, lines, rows
from poimen_exp.corpus.cache import inflate
from poimen_exp.corpus.rows import RowError, decode_row
from poimen_exp.errors import CorpusError

from .support import document, labelled, open_at, question, three_projects, write, write_raw


def encode(*records: dict[str, Any], end: str = "\n", **options: Any) -> bytes:
    return "".join(json.dumps(record, **options) + end for record in records).encode()


def refused(tmp_path: Path, data: bytes, records: int = 4) -> str:
    with pytest.raises(CorpusError) as error:
        open_at(write_raw(tmp_path / "c", data, records))
    return str(error.value).removeprefix(f"{tmp_path}/c/")


GOOD = encode(*three_projects())


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + GOOD,
        encode(*three_projects(), end="\r\n"),
        encode(*three_projects(), end="\n\n \t\r\n"),
        GOOD.removesuffix(b"\n"),
        encode(*three_projects(), indent=None, separators=(" , ", " : ")),
        encode(*[{"meta": {"type": 1, "text": [2]}, "note": "evidence"} | row for row in three_projects()]),
        encode(*[row | {"question": 'Which "type": or \\"text\\": ?'} for row in three_projects()]),
    ],
    ids=["bom", "crlf", "blank lines", "no last newline", "spaced", "extra fields", "text that looks like keys"],
)
def test_what_json_writers_do_is_accepted(tmp_path: Path, data: bytes) -> None:
    assert len(open_at(write_raw(tmp_path / "c", data, 3)).split("train")) == 1


def test_line_separators_inside_text_are_text_and_do_not_count_as_lines(tmp_path: Path) -> None:
    first = labelled("t0", "p0", [True], question="a\u2028b\u0085c\x0bd\x1ce")
    data = encode(first, *three_projects()[1:], ensure_ascii=False)
    corpus = open_at(write_raw(tmp_path / "c", data, 3))
    tasks = [task for side in ("train", "val", "test") for task in corpus.split(side)]  # type: ignore[arg-type]
    assert {task.source.rpartition(":")[2] for task in tasks} == {"1", "2", "3"}
    assert "a\u2028b\u0085c\x0bd\x1ce" in {task.question for task in tasks}


def test_the_line_in_a_message_is_the_physical_one(tmp_path: Path) -> None:
    first = three_projects()[0] | {"question": "one\u2028line"}
    data = b"\n\r\n" + encode(first, ensure_ascii=False) + b"nonsense\n"
    assert refused(tmp_path, data).startswith("corpus.jsonl:4: not one JSON object in UTF-8: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"type":"trajectory","trajectory_id":"t9"', "not one JSON object in UTF-8: Input data was truncated"),
        (b"[1, 2]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b"3", "Expected `object`, got `int`"),
        (b'{"type":"trajectory","trajectory_id":NaN}', "not one JSON object in UTF-8: "),
        (b'{"type":"trajectory","trajectory_id":"\\ud800"}', "not one JSON object in UTF-8: "),
        (b'{"type":"trajectory","trajectory_id":"\xff"}', "not one JSON object in UTF-8: Invalid UTF-8"),
        (b"\x00\x00", "not one JSON object in UTF-8: "),
        (b"{} {}", "Object missing required field `type`"),
        (b'{"type":"chapter"}', "Invalid value 'chapter' - at `$.type` (expected document or trajectory)"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not read: nested too deeply"),
        (b'{"type":"document","document_id":1,"project":"p","units":[]}', 'write 1 as "1"'),
        (b'{"type":"document","document_id":"d","project":"p","units":[]}', "document 'd' has no text"),
        (b'{"type":"trajectory","trajectory_id":"t","question":"q"}', "missing required field `answers`"),
    ],
)
def test_a_line_that_is_no_row_is_refused_with_its_place(tmp_path: Path, line: bytes, message: str) -> None:
    got = refused(tmp_path, GOOD + line)
    assert got.startswith("corpus.jsonl:4: ")
    assert message in got


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"trajectory","type":"trajectory","trajectory_id":"t","project":"p","question":"q","answers":null,'
        b'"chunks":[{"text":"a","evidence":true}]}',
        b'{"type":"trajectory","trajectory_id":"t","project":"p","question":"q","answers":null,'
        b'"chunks":[{"text":"a","evidence":true,"evidence":false}]}',
        b'{"type":"trajectory","trajectory_id":"t","project":"p","question":"q","answers":null,'
        b'"chunks":[{"text":"a","evidence":true,"evid\\u0065nce" : false}]}',
        b'{"type":"document","document_id":"d","project":"p","units":[{"unit_id":"u","text":"a","text":"b"}]}',
        b'{"type":"document","document_id":"d","project":"p","project" :"q","units":[{"unit_id":"u","text":"a"}]}',
    ],
)
def test_a_key_that_occurs_twice_is_refused(line: bytes) -> None:
    with pytest.raises(RowError, match="occurs twice in one object; keep one"):
        decode_row(line)


@pytest.mark.parametrize("size", [0, 10_000], ids=["short", "long"])
def test_colons_are_counted_alike_in_short_and_long_lines(size: int) -> None:
    filler = b"x" * size
    for text, found in (
        (b'{"a":1,"b":2}', (2, False)),
        (b'{"a" :1,"b":2}', (1, True)),
        (b'{"a" \t\r :1}', (0, True)),
        (b'{"a":"on : off"}', (1, False)),
        (b':"a":', (1, False)),
        (b'"', (0, False)),
    ):
        assert rows._colons(text + filler) == found
        assert rows._colons(filler + text) == found


@pytest.mark.parametrize("spaced", [b":", b" :", b"\t:"])
def test_a_key_that_occurs_twice_is_refused_in_a_long_line_too(spaced: bytes) -> None:
    long = b"a" * 10_000
    line = b'{"type":"document","document_id":"d","project":"p","project"%s"q","units":[{"unit_id":"u","text":"%s"}]}'
    with pytest.raises(RowError, match="occurs twice in one object; keep one"):
        decode_row(line % (spaced, long))


def changed(row: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({key: value for key, value in (row | changes).items() if value != "absent"}).encode()


FIRST, SECOND = question("t", "d", [("u0", 0, 1)]), labelled("t", "p", [True, False])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (changed(FIRST, chunks=[]), "both document_id and chunks"),
        (changed(FIRST, document_id="absent"), "neither document_id nor chunks"),
        (changed(FIRST, evidence="absent"), "evidence is missing; write null"),
        (changed(FIRST, evidence=[{"unit_id": "u", "start": 3, "end": 3}]), "expected 0 <= start < end"),
        (changed(FIRST, evidence=[{"unit_id": "u", "start": -1, "end": 3}]), "expected 0 <= start < end"),
        (changed(FIRST, evidence=[{"unit_id": "u", "start": 0.5, "end": 3}]), r"Expected `int`, got `float`"),
        (changed(FIRST, answers=[]), "answers: got an empty list"),
        (changed(FIRST, answers=[2022]), r"Expected `str`, got `int` - at `\$.answers"),
        (changed(FIRST, question=" \n"), "question: got no text"),
        (changed(FIRST, trajectory_id="a\tb"), "trajectory_id: got 'a\\\\tb'"),
        (changed(FIRST, trajectory_id=""), "trajectory_id: got ''"),
        (changed(SECOND, project="absent"), "project is missing"),
        (changed(SECOND, evidence=None), "evidence is given beside chunks"),
        (changed(SECOND, chunks=[]), "expected at least one chunk"),
        (changed(SECOND, chunks=[{"text": " ", "evidence": None}]), r"chunks\[0\].text: got no text"),
        (changed(SECOND, chunks=[{"text": "a"}]), "missing required field `evidence`.*write null"),
        (changed(SECOND, chunks=[{"text": "a", "evidence": 1}]), "Expected `bool | null`, got `int`"),
        (changed(SECOND, exit_index=2), "exit_index: got 2, expected 0 to 1"),
        (changed(SECOND, exit_index=True), "Expected `int | null`, got `bool`"),
        (changed(labelled("t", "p", [False, True]), exit_index=0), "chunk 1 still holds evidence"),
        (changed(document("d", "p", ["a", "b"]) | {"units": [{"unit_id": "u", "text": "a"}] * 2}), "'u' occurs twice"),
        (changed(document("d", "", ["a"])), "project: got ''"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(line: bytes, message: str) -> None:
    with pytest.raises(RowError, match=message):
        decode_row(line)


def test_an_enormous_line_is_refused_without_being_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1000)
    data = GOOD + b'{"x":"' + b"a" * 5_000 + b'"}\n' + b"broken\n"
    assert refused(tmp_path, data).startswith("corpus.jsonl:4: the line has over 1,000 bytes")
    found: list[int] = []
    path = tmp_path / "c" / "corpus.jsonl"
    reader = lines.LineReader(path, "f", lambda _file, line, _message: found.append(line))
    assert [number for number, _, _ in reader] == [1, 2, 3, 5]
    assert found == [4]
    assert reader.sha256 == hashlib.sha256(data).hexdigest()


def test_a_gzip_file_is_read_like_the_plain_one(tmp_path: Path) -> None:
    corpus = open_at(write_raw(tmp_path / "c", gzip.compress(GOOD), 3, "corpus.jsonl.gz"))
    plain = open_at(write_raw(tmp_path / "plain", GOOD, 3))
    for side in ("train", "val", "test"):
        packed, expected = corpus.split(side)[0], plain.split(side)[0]  # type: ignore[arg-type]
        assert packed.source == expected.source.replace("/plain/corpus.jsonl", "/c/corpus.jsonl.gz")
        assert replace(packed, source="") == replace(expected, source="")


def test_a_truncated_gzip_file_is_refused_with_the_line_it_reached(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"corpus\.jsonl\.gz:\d+: the gzip stream is damaged"):
        open_at(write_raw(tmp_path / "c", gzip.compress(GOOD)[:-12], 3, "corpus.jsonl.gz"))


def test_all_members_and_the_padding_of_a_gzip_file_are_in_its_hash(tmp_path: Path) -> None:
    first, rest = GOOD.split(b"\n", 1)
    data = gzip.compress(first + b"\n") + gzip.compress(rest) + bytes(300_000)
    assert len(open_at(write_raw(tmp_path / "c", data, 3, "corpus.jsonl.gz")).index.tasks) == 3


def test_a_gzip_file_that_changes_between_hash_and_text_is_refused_and_not_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_raw(tmp_path / "c", gzip.compress(GOOD), 3, "corpus.jsonl.gz")
    file, real = folder / "corpus.jsonl.gz", index._file_sha256

    def overwritten(path: Path) -> str:
        found = real(path)
        file.write_bytes(gzip.compress(GOOD.replace(b"Who?", b"How?")))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(index, "_file_sha256", overwritten)
        with pytest.raises(CorpusError, match=r"corpus\.jsonl\.gz:1: the file changed while it was read"):
            open_at(folder)
    assert list((cache / "inflated").iterdir()) == []
    file.write_bytes(gzip.compress(GOOD))
    assert open_at(folder).split("train")[0].question == "Who?"


def test_two_that_inflate_one_file_at_once_both_get_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers that share a cache may share process ids as well."""
    path, data = tmp_path / "corpus.jsonl.gz", gzip.compress(GOOD)
    path.write_bytes(data)
    real, texts = gzip.GzipFile.read, []

    def inflated() -> None:
        kept = inflate(path, "f", hashlib.sha256(data).hexdigest(), lines.refuse)
        texts.append(kept and kept.read_bytes())

    def overtaken(*arguments: Any) -> bytes:
        monkeypatch.setattr(gzip.GzipFile, "read", real)
        inflated()
        return real(*arguments)

    monkeypatch.setattr(gzip.GzipFile, "read", overtaken)
    inflated()
    assert texts == [GOOD, GOOD]


def test_utf_16_is_named(tmp_path: Path) -> None:
    assert "UTF-16" in refused(tmp_path, GOOD.decode().encode("utf-16"))


@pytest.mark.parametrize("second", ["t0", "t1"])
def test_ids_that_occur_twice_are_refused_also_far_apart(tmp_path: Path, second: str) -> None:
    data = GOOD + encode(labelled(second, "p9", [True]))
    assert refused(tmp_path, data).startswith(f"corpus.jsonl:4: trajectory_id '{second}' is already at ")


def test_document_ids_that_occur_twice_are_refused(tmp_path: Path) -> None:
    data = encode(document("d", "p", ["a"]), *three_projects(), document("d", "p", ["b"]))
    assert "corpus.jsonl:5: document_id 'd' is already at " in refused(tmp_path, data, 5)


def test_ids_in_two_files_are_the_same_ids(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", three_projects())
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "more.jsonl").write_bytes((folder / "corpus.jsonl").read_bytes())
    manifest["files"].append(manifest["files"][0] | {"path": "more.jsonl"})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match=r"more\.jsonl:1: trajectory_id 't0' is already at .*corpus\.jsonl:1"):
        open_at(folder)
