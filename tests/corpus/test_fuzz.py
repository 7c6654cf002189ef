"""No input crashes the reader with anything but its own error."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from poimen_exp.corpus import load_manifest
from poimen_exp.corpus.rows import RowError, decode_row
from poimen_exp.errors import CorpusError, Refused

from .support import document, labelled, open_at, question, three_projects, write_raw

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["trajectory", "document"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
VALID: list[dict[str, Any]] = [
    document("d", "p0", ["one text", "two"], "[H]"),
    question("t", "d", [("u0", 0, 3)], exit_index=None),
    labelled("x", "p1", [True, None], exit_index=1),
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid row with one value replaced by anything, somewhere inside."""
    row = json.loads(json.dumps(draw(st.sampled_from(VALID))))
    node: Any = row
    while True:
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if isinstance(node[key], dict | list) and node[key] and draw(st.booleans()):
            node = node[key]
            continue
        node[key] = draw(JSON)
        return json.dumps(row).encode()


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200) | mutated() | JSON.map(lambda value: json.dumps(value).encode()))
@example(b'{"type":"document","document_id":"d","project":"p","units":[{"unit_id":"u","text":"\\ud800"}]}')
@example(b"\xef\xbb\xbf{}")
def test_a_line_is_a_row_or_a_row_error(line: bytes) -> None:
    with contextlib.suppress(RowError):
        decode_row(line)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(mutated() | st.binary(max_size=60), max_size=4), st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r"]))
def test_a_file_is_a_corpus_or_a_corpus_error_with_file_and_line(rows: list[bytes], end: bytes) -> None:
    data = b"".join(json.dumps(row).encode() + b"\n" for row in [*three_projects(), VALID[0]]) + end.join(rows)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POIMEN_CACHE"] = folder + "/cache"  # set for the test by the fixture, and restored by it
        write_raw(Path(folder), data, 4 + sum(bool(row.strip()) for row in data.split(b"\n")[4:]))
        said = ""
        try:
            corpus = open_at(Path(folder))
            for side in ("train", "val", "test"):
                list(corpus.split(side))  # type: ignore[arg-type]
        except CorpusError as error:
            said = str(error)
        except Refused as error:
            said = str(error)
            assert_side_without_tasks(said)
            return
    assert not said or PLACE.match(said.removeprefix(folder))


PLACE = re.compile(r"/(corpus\.jsonl|manifest\.json):[0-9]+: .")


def assert_side_without_tasks(message: str) -> None:
    assert "split has no task" in message


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_manifest(value: Any) -> bytes:
    return as_bytes({"schema": "poimen.manifest/1", "corpus_id": "c", "files": value, "labels": value})


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80) | JSON.map(as_bytes) | JSON.map(as_manifest))
def test_a_manifest_is_one_or_a_corpus_error(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "manifest.json").write_bytes(text)
        with contextlib.suppress(CorpusError):
            load_manifest(folder)
