"""Cohen's kappa of two labelers, and the manifest block that carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from poimen_exp.corpus.contract import Chunking, Confusion
from poimen_exp.corpus.labels import Labels, exit_labels, exit_target, labels_sha256
from poimen_exp.corpus.lines import LineReader, refuse
from poimen_exp.corpus.rows import DocumentRow, LabelledChunk, RowError, decode_row
from poimen_exp.errors import CorpusError, Refused

RESAMPLES = 2000


@dataclass(frozen=True)
class LabelledTrajectory:
    """What one labeler said of one trajectory."""

    project: str
    evidence: Labels
    exit: Labels


@dataclass(frozen=True)
class GateAgreement:
    """Agreement on one gate. ``kappa`` None: undefined, since a labeler used one class only.

    Attributes:
        low, high: 95 % bootstrap interval over projects (chunks of one document are not independent); None below
            three projects, or where no resample defines kappa.
        skipped: chunks that one of the two left unlabelled.
        undefined: resamples without a defined kappa, out of ``RESAMPLES``.
    """

    gate: str
    kappa: float | None
    low: float | None
    high: float | None
    confusion: Confusion
    skipped: int
    n_trajectories: int
    n_projects: int
    undefined: int


class _LabelRow(msgspec.Struct):
    """A line of a labels file; a second-form trajectory of a corpus is read as one too."""

    trajectory_id: str
    project: str
    evidence: list[bool | None]
    exit_index: int | None = None


def read_labels(path: Path) -> dict[str, LabelledTrajectory]:
    """A labeler's file: lines ``{"trajectory_id", "project", "evidence": [true, false, null], "exit_index"}``, or the
    second-form trajectories of a corpus.

    Raises:
        CorpusError: with file and physical line.
    """
    if not path.is_file():
        raise CorpusError(f"{path}:1: not found, or not a file")
    found: dict[str, LabelledTrajectory] = {}
    for number, _, raw in LineReader(path, str(path), refuse):
        try:
            name, project, labels, stop = _label_row(raw)
            if not labels:
                raise RowError("evidence: got an empty list, expected one label a chunk")
            target = exit_target(labels, stop)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise CorpusError(f"{path}:{number}: {error}") from None
        if name in found:
            raise CorpusError(f"{path}:{number}: trajectory_id {name!r} occurs twice")
        found[name] = LabelledTrajectory(project, labels, exit_labels(target, len(labels)))
    return found


def _label_row(raw: bytes) -> tuple[str, str, Labels, int | None]:
    if b'"chunks"' in raw:
        row = decode_row(raw)
        if isinstance(row, DocumentRow) or not isinstance(row.chunks, list):
            raise RowError("got a row without labelled chunks; export one label a chunk")
        return row.trajectory_id, str(row.project), _chunk_labels(row.chunks), row.stop
    label = msgspec.json.decode(raw, type=_LabelRow)
    return label.trajectory_id, label.project, tuple(label.evidence), label.exit_index


def _chunk_labels(chunks: Sequence[LabelledChunk]) -> Labels:
    return tuple(chunk.evidence for chunk in chunks)


def measure(
    first: Mapping[str, LabelledTrajectory], second: Mapping[str, LabelledTrajectory], seed: int = 0
) -> tuple[GateAgreement, GateAgreement]:
    """Agreement on update (evidence of each chunk) and exit (exit-here of each chunk) over the trajectories in both.

    Raises:
        Refused: no trajectory in common, or one with different chunks or projects.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise Refused("agreement: the two files have no trajectory_id in common")
    for name in shared:
        if len(first[name].evidence) != len(second[name].evidence) or first[name].project != second[name].project:
            raise Refused(
                f"agreement: trajectory {name!r} has {len(first[name].evidence)} chunks of project "
                f"{first[name].project!r} in one file and {len(second[name].evidence)} of {second[name].project!r} in "
                "the other; both labelers must have had the same chunks"
            )
    update = [(first[name].project, name, first[name].evidence, second[name].evidence) for name in shared]
    stop = [(first[name].project, name, first[name].exit, second[name].exit) for name in shared]
    return _agreement("update", update, seed), _agreement("exit", stop, seed)


def _agreement(gate: str, rows: Sequence[tuple[str, str, Labels, Labels]], seed: int) -> GateAgreement:
    projects = sorted({project for project, *_ in rows})
    cells = np.zeros((len(projects), 4), np.int64)
    used_trajectories, skipped = 0, 0
    for project, _, mine, theirs in rows:
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None]
        skipped += len(mine) - len(pairs)
        used_trajectories += bool(pairs)
        for a, b in pairs:
            cells[projects.index(project), 2 * (not a) + (not b)] += 1
    cells = cells[cells.sum(1) > 0]
    confusion = Confusion(*(int(count) for count in cells.sum(0)))
    low, high, undefined = _interval(cells, seed)
    return GateAgreement(gate, confusion.kappa, low, high, confusion, skipped, used_trajectories, len(cells), undefined)


def _interval(cells: npt.NDArray[np.int64], seed: int) -> tuple[float | None, float | None, int]:
    """Interval over projects drawn with replacement; [P, 4] counts pp, pn, np, nn."""
    if len(cells) < 3:
        return None, None, 0
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(cells), (RESAMPLES, len(cells)))
    values = [Confusion(*(int(n) for n in cells[rows].sum(0))).kappa for rows in drawn]
    defined = [value for value in values if value is not None]
    if not defined:
        return None, None, RESAMPLES
    low, high = np.quantile(defined, [0.025, 0.975])
    return float(low), float(high), RESAMPLES - len(defined)


def manifest_labels(
    agreements: Sequence[GateAgreement],
    hashes: Mapping[str, str],
    labelers: tuple[str, str],
    design: str,
    chunking: Chunking | None,
) -> dict[str, Any]:
    """The ``labels`` object of a manifest. An undefined kappa is null, which the loader refuses.

    Args:
        hashes: ``labels_sha256`` of the corpus by gate.
        chunking: None where the chunks stand in the corpus itself.
    """
    return {
        one.gate: {
            "origin": "labeled",
            "agreement": {
                "design": design,
                "labelers": list(labelers),
                "kappa": one.kappa,
                "interval_95_by_project": None if one.low is None else [one.low, one.high],
                "confusion": {"pp": one.confusion.pp, "pn": one.confusion.pn, "np": one.confusion.np,
                              "nn": one.confusion.nn},
                "n_units": one.confusion.total,
                "n_trajectories": one.n_trajectories,
                "n_projects": one.n_projects,
                "labels_sha256": hashes[one.gate],
                "chunk_tokens": None if chunking is None else chunking.chunk_tokens,
                "tokenizer_sha256": None if chunking is None else chunking.tokenizer_sha256,
            },
        }
        for one in agreements
    }  # fmt: skip


def label_hashes(labels: Mapping[str, LabelledTrajectory]) -> dict[str, str]:
    """``labels_sha256`` by gate of the labels that a corpus adopts."""
    return {
        "update": labels_sha256((name, one.evidence) for name, one in labels.items()),
        "exit": labels_sha256((name, one.exit) for name, one in labels.items()),
    }
