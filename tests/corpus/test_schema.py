"""The JSON Schema for people who export from other languages says what the loader says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator

from poimen_exp.corpus import load_manifest
from poimen_exp.corpus.rows import RowError, decode_row
from poimen_exp.errors import CorpusError

from .support import document, labelled, question
from .test_contract import REFUSALS, labels, manifest_with
from .test_fuzz import VALID, mutated

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "corpus.schema.json").read_text())
ROW = Draft202012Validator(SCHEMA)
MANIFEST = Draft202012Validator({"$ref": "#/$defs/manifest", "$defs": SCHEMA["$defs"]})

ONLY_LOADER = ("expected 0 <= start < end", "occurs twice", "still holds evidence", "expected 0 to")
"""Refusals that compare values with each other, which a schema cannot."""


def loader_says(row: Any) -> str:
    try:
        decode_row(json.dumps(row).encode())
    except RowError as error:
        return str(error)
    return ""


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("row", VALID, ids=["document", "over a document", "with chunks"])
def test_valid_rows_are_valid_to_both(row: dict[str, Any]) -> None:
    assert loader_says(row) == ""
    assert ROW.is_valid(row)


BROKEN = [
    {key: value for key, value in row.items() if key != left_out}
    for row in (document("d", "p", ["a"]), question("t", "d", [("u0", 0, 1)]), labelled("x", "p", [True]))
    for left_out in row
]


@pytest.mark.parametrize("row", BROKEN, ids=str)
def test_no_key_of_the_format_may_be_left_out(row: dict[str, Any]) -> None:
    assert loader_says(row) != ""
    assert not ROW.is_valid(row)


@settings(max_examples=400, deadline=None)
@given(mutated())
def test_schema_and_loader_agree_on_mutated_rows(line: bytes) -> None:
    try:
        row = json.loads(line)
        json.dumps(row, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return  # NaN and lone surrogates are no JSON: the loader refuses them, a schema never sees them
    said = loader_says(row)
    if any(number in line for number in (b".0", b"e+", b"e-")) or any(reason in said for reason in ONLY_LOADER):
        return  # 1.0 is an integer to JSON Schema
    if "out of range" in said:
        return
    assert ROW.is_valid(row) == (said == ""), said


@pytest.mark.parametrize("changes", [{}, *[changes for changes, _ in REFUSALS]], ids=str)
def test_manifests_that_the_schema_refuses_are_refused_by_the_loader(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The other way round some pass: kappa against its confusion is the loader's to compare."""
    folder = manifest_with(tmp_path, labels("update", **changes))
    if not MANIFEST.is_valid(json.loads((folder / "manifest.json").read_text())):
        assert changes
        with pytest.raises(CorpusError):
            load_manifest(folder)
    if not changes:
        load_manifest(folder)
