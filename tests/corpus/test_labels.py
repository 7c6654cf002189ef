"""Evidence to labels, labels to exit, and the hash that others must be able to compute."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from poimen_exp.corpus.chunking import ChunkPlan
from poimen_exp.corpus.labels import Labels, exit_labels, exit_target, labels_sha256, span_labels
from poimen_exp.corpus.rows import Span, Unit
from poimen_exp.gates.types import ExitTarget

T, F, N = True, False, None


@pytest.mark.parametrize(
    ("evidence", "exit_index", "expected"),
    [
        ((F, T, F), None, ExitTarget(True, 1)),
        ((T, F, T), None, ExitTarget(True, 2)),
        ((F, F), None, ExitTarget(True, None)),  # fully labelled without evidence: never
        ((T, N, F), None, ExitTarget(False)),  # a null after the last true
        ((N, T, F), None, ExitTarget(True, 1)),  # a null before it changes nothing
        ((F, N), None, ExitTarget(False)),
        ((N, N), None, ExitTarget(False)),
        ((T, N, F), 1, ExitTarget(True, 1)),  # exit_index wins
        ((F, T, F), 1, ExitTarget(True, 1)),
        ((F, F, F), 2, ExitTarget(True, 2)),
        ((T, F, F), 2, ExitTarget(True, 2)),
        ((N, N), 0, ExitTarget(True, 0)),
    ],
)
def test_the_exit_target_follows_the_last_evidence(
    evidence: Labels, exit_index: int | None, expected: ExitTarget
) -> None:
    assert exit_target(evidence, exit_index) == expected


def test_an_exit_before_the_last_evidence_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0, but chunk 1 still holds evidence"):
        exit_target((T, T, F), 0)


@pytest.mark.parametrize("exit_index", [-1, 2])
def test_an_exit_that_is_no_chunk_is_refused(exit_index: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to 1"):
        exit_target((F, F), exit_index)


def test_exit_here_is_one_chunk_none_or_unknown() -> None:
    assert exit_labels(ExitTarget(True, 1), 3) == (F, T, F)
    assert exit_labels(ExitTarget(True, None), 2) == (F, F)
    assert exit_labels(ExitTarget(False), 2) == (N, N)


UNITS = [Unit("u0", "abc   def"), Unit("u1", "xyz")]
PLAN = ChunkPlan((((0, 0, 4),), ((0, 4, 9), (1, 0, 3))), (4, 9))


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (Span("u0", 0, 1), (T, F)),
        (Span("u0", 2, 6), (T, F)),  # reaches the second chunk with white space only
        (Span("u0", 2, 7), (T, T)),  # with the d of def
        (Span("u0", 3, 7), (F, T)),
        (Span("u1", 2, 3), (F, T)),
    ],
)
def test_a_chunk_is_evidence_if_it_shares_a_visible_character_with_a_span(span: Span, expected: Labels) -> None:
    assert span_labels(PLAN, UNITS, [span]) == expected


def test_no_labels_and_no_evidence_are_not_the_same() -> None:
    assert span_labels(PLAN, UNITS, None) == (N, N)
    assert span_labels(PLAN, UNITS, []) == (F, F)


ROWS: list[tuple[str, Labels]] = [
    ("b", (T, F)),
    ("a-10", (N,) * 11),
    ("a-2", (F, N, T)),
    ("é", (F,)),
    ("Z", (T,)),
    ("a", (F,)),
]


def test_the_label_hash_is_that_of_the_written_out_lines() -> None:
    # printf 'a\t0\t1\na\t1\t?\nb\t0\t0\n' | sha256sum
    expected = "65e8faa29f5e0e1d5f5d1fa49ab3409f77e60fa6e197835bf68800db16d48642"
    assert labels_sha256([("b", (F,)), ("a", (T, N))]) == expected


def test_jq_sort_and_sha256sum_compute_the_same_hash(
    tmp_path: Path, require: Callable[[str, str | None], None]
) -> None:
    missing = [tool for tool in ("jq", "sort", "sha256sum", "bash") if shutil.which(tool) is None]
    require("jq", f"not installed: {missing}" if missing else None)
    rows = [
        {"trajectory_id": name, "chunks": [{"text": "x", "evidence": label} for label in labels]}
        for name, labels in ROWS
    ]
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    mark = 'if . == null then "?" elif . then "1" else "0" end'
    program = (
        f".trajectory_id as $id | .chunks | to_entries[] | [$id, (.key | tostring), (.value.evidence | {mark})] | @tsv"
    )
    script = f"jq -r '{program}' {file} | LC_ALL=C sort -t $'\\t' -k1,1 -k2,2n | sha256sum"
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout.split()[0] == labels_sha256(ROWS)


AWK = r"""
BEGIN { FS = "\t" }
{ n = length($2); for (i = 1; i <= n; i++) printf "%s\t%d\t%s\n", $1, i - 1, substr($2, i, 1) }
"""


def test_awk_computes_the_same_hash(tmp_path: Path) -> None:
    """From a labeler's table of id and one mark a chunk; the order of rows does not matter."""
    marks = {None: "?", True: "1", False: "0"}
    table = tmp_path / "labels.tsv"
    table.write_text("".join(f"{name}\t{''.join(marks[one] for one in labels)}\n" for name, labels in ROWS), "utf-8")
    script = f"awk '{AWK}' {table} | LC_ALL=C sort -t $'\\t' -k1,1 -k2,2n | sha256sum"
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout.split()[0] == labels_sha256(reversed(ROWS))
