"""From evidence spans and exported labels to one label a chunk, the exit target, and the hash that pins both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from poimen_exp.corpus.chunking import ChunkPlan
from poimen_exp.corpus.rows import Span, Unit
from poimen_exp.gates.types import ExitTarget

Labels = tuple[bool | None, ...]


def span_labels(plan: ChunkPlan, units: Sequence[Unit], spans: Sequence[Span] | None) -> Labels:
    """True for each chunk that shares a character other than white space with a span; all None without labels."""
    if spans is None:
        return (None,) * len(plan.chunks)
    wanted: dict[str, list[Span]] = {}
    for span in spans:
        wanted.setdefault(span.unit_id, []).append(span)
    asked = {position: unit for position, unit in enumerate(units) if unit.unit_id in wanted}
    return tuple(
        any(
            bool(asked[unit].text[max(start, span.start) : min(end, span.end)].strip())
            for unit, start, end in pieces
            if unit in asked
            for span in wanted[asked[unit].unit_id]
            if span.start < end and start < span.end
        )
        for pieces in plan.chunks
    )


def exit_target(evidence: Labels, exit_index: int | None) -> ExitTarget:
    """Where reading should stop: ``exit_index`` if given, else the last chunk that holds evidence.

    Known only if no chunk after the last evidence is unlabelled; fully labelled without evidence is "never".

    Raises:
        ValueError: ``exit_index`` is no chunk, or evidence comes after it.
    """
    last_true = max((index for index, label in enumerate(evidence) if label), default=None)
    if exit_index is not None:
        if not 0 <= exit_index < len(evidence):
            raise ValueError(f"exit_index: got {exit_index}, expected 0 to {len(evidence) - 1}")
        if last_true is not None and exit_index < last_true:
            raise ValueError(
                f"exit_index: got {exit_index}, but chunk {last_true} still holds evidence; stop there or later"
            )
        return ExitTarget(known=True, index=exit_index)
    after = evidence if last_true is None else evidence[last_true + 1 :]
    if any(label is None for label in after):
        return ExitTarget(known=False)
    return ExitTarget(known=True, index=last_true)


def exit_labels(target: ExitTarget, n_chunks: int) -> Labels:
    """Exit-here for each chunk: True at the target only; all None where the target is unknown."""
    if not target.known:
        return (None,) * n_chunks
    return tuple(index == target.index for index in range(n_chunks))


def labels_sha256(labels: Iterable[tuple[str, Labels]]) -> str:
    """SHA-256 of UTF-8 lines ``trajectory_id TAB chunk_index TAB 1|0|? LF``, by id bytes, then index.

    Any language can compute it: ``sort -t TAB -k1,1 -k2,2n`` under ``LC_ALL=C``, then ``sha256sum``.
    """
    digest = hashlib.sha256()
    for name, values in sorted((trajectory.encode(), values) for trajectory, values in labels):
        for index, value in enumerate(values):
            mark = b"?" if value is None else b"1" if value else b"0"
            digest.update(b"%s\t%d\t%s\n" % (name, index, mark))
    return digest.hexdigest()
