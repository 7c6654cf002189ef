"""``metrics.jsonl``: one object a line, appended and synced at every step. It is the record of a run."""

from __future__ import annotations

import json
import math
import operator
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

from poimen_exp.errors import RunFailed
from poimen_exp.tracking.files import free_name, write_atomic
from poimen_exp.tracking.metric_names import check_names, denominator_of

TAIL_FOLDER = "recovery-tails"


@dataclass(frozen=True)
class MetricLine:
    """One line: the metrics of a step and, under the same names, what each mean was taken over.

    ``time_s`` counts from the start of the run, and goes on where a resumed run left off.
    """

    step: int
    time_s: float
    metrics: Mapping[str, float]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class MetricsRead:
    """What a ``metrics.jsonl`` holds.

    ``unfinished_bytes``: length of a last line that a killed process did not finish; 0 where every line is whole.
    ``offsets``: byte offset behind each line.
    """

    lines: tuple[MetricLine, ...]
    offsets: tuple[int, ...]
    unfinished_bytes: int


def read_metrics(path: Path) -> MetricsRead:
    """Reads a log; an unfinished last line is left out and its length told.

    Raises:
        RunFailed: a whole line that is not a metrics object; the message starts with ``file:line``.
    """
    data = path.read_bytes() if path.exists() else b""
    lines, offsets, end = [], [], 0
    for number, raw in enumerate(data.split(b"\n")[:-1], start=1):
        lines.append(parse_line(raw, f"{path}:{number}"))
        end += len(raw) + 1
        offsets.append(end)
    return MetricsRead(tuple(lines), tuple(offsets), len(data) - end)


def parse_line(raw: bytes, where: str) -> MetricLine:
    """One line of a log, every rule of the format checked."""
    try:
        data: Any = json.loads(raw, parse_constant=_no_constant)
        line = MetricLine(
            operator.index(data["step"]),
            float(data["time_s"]),
            {str(name): float(value) for name, value in data["metrics"].items()},
            {str(name): operator.index(count) for name, count in data["counts"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFailed(
            f"{where}: damaged: {error!r}; expected an object with step, time_s, metrics, counts"
        ) from error
    orphans = sorted(set(line.counts) - set(line.metrics))
    if orphans or any(count <= 0 for count in line.counts.values()):
        raise RunFailed(f"{where}: damaged: counts {orphans or dict(line.counts)} without a metric, or not positive")
    return line


def by_step(lines: Iterable[MetricLine]) -> dict[int, MetricLine]:
    """The lines of each step merged into one, in order of step (a validation may have a line of its own)."""
    merged: dict[int, MetricLine] = {}
    for line in lines:
        old = merged.get(line.step)
        if old is not None:
            line = MetricLine(line.step, line.time_s, {**old.metrics, **line.metrics}, {**old.counts, **line.counts})
        merged[line.step] = line
    return dict(sorted(merged.items()))


def lines_logged(folder: Path) -> int:
    """Whole lines that a run has ever logged, those that resumes dropped included."""
    tails = sorted((folder / TAIL_FOLDER).glob("metrics-*.jsonl"))
    return sum(path.read_bytes().count(b"\n") for path in (folder / "metrics.jsonl", *tails) if path.exists())


def clean(step: int, metrics: Mapping[str, Any], counts: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, int]]:
    """Metrics and counts as a line holds them: known names, finite numbers, a denominator for every mean.

    A metric with count 0 is left out, whatever its value: nothing was measured.

    Raises:
        RunFailed: an unknown name, a NaN or infinity, a mean without its count, a count without its metric; the
            message names the metric and the step.
    """
    check_names(metrics)
    kept_counts = {name: operator.index(count) for name, count in counts.items()}
    kept: dict[str, float] = {}
    for name in sorted(metrics):
        if kept_counts.get(name) == 0:
            continue
        value = float(metrics[name])
        if not math.isfinite(value):
            raise RunFailed(
                f"metric {name} at step {step}: got {value}, expected a finite number (count 0 leaves it out)"
            )
        if denominator_of(name) is not None and name not in kept_counts:
            raise RunFailed(f"metric {name} at step {step}: a mean without its count of {denominator_of(name)}")
        kept[name] = value
    for name, count in kept_counts.items():
        if count < 0 or (count > 0 and name not in metrics):
            raise RunFailed(f"count of {name} at step {step}: got {count} without a metric of that name, or negative")
    return kept, {name: kept_counts[name] for name in sorted(kept) if name in kept_counts}


class MetricsLog:
    """Appends to ``metrics.jsonl``; what was appended survives ``kill -9`` and a power cut.

    Opening an existing log goes on behind its last whole line; an unfinished last line moves to ``recovery-tails/``
    beside it.

    Args:
        path: the file; its folder must exist.
        clock: seconds, monotonic.
        say: where a sentence about a repaired log goes.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, say: Callable[[str], None] | None = None
    ) -> None:
        self.path, self._clock = path, clock
        read = read_metrics(path)
        if read.unfinished_bytes:
            data = path.read_bytes()
            tail = self._replace(data[: -read.unfinished_bytes], data[-read.unfinished_bytes :], "unfinished-line")
            if say is not None:
                say(f"{path}: the last line was not finished ({read.unfinished_bytes} bytes); moved to {tail}")
        self._index(read.lines)
        self._file = path.open("ab")

    def _index(self, lines: tuple[MetricLine, ...]) -> None:
        self._names: dict[int, set[str]] = defaultdict(set)
        for line in lines:
            self._names[line.step].update(line.metrics)
        self.last_step = max(self._names, default=None)
        self._begun = self._clock() - (lines[-1].time_s if lines else 0.0)

    @property
    def position(self) -> int:
        """Bytes in the log: what a checkpoint stores as ``metrics_bytes``."""
        return self.path.stat().st_size

    def append(self, step: int, metrics: Mapping[str, Any], counts: Mapping[str, Any]) -> MetricLine:
        """Writes one line and syncs it to disk.

        A step may have a second line (a validation logged on its own, also after later steps), but no metric twice.

        Raises:
            RunFailed: as ``clean``; a metric that this step has already.
        """
        if step < 0:
            raise RunFailed(f"{self.path}: got step {step}, expected 0 or more")
        values, denominators = clean(step, metrics, counts)
        twice = sorted(self._names[step] & set(values))
        if twice:
            raise RunFailed(f"{self.path}: metric {twice[0]} at step {step} is logged already")
        line = MetricLine(step, round(self._clock() - self._begun, 3), values, denominators)
        self._file.write(encode_line(line))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._names[step].update(values)
        self.last_step = step if self.last_step is None else max(self.last_step, step)
        return line

    def truncate_to(self, step: int, offset: int | None = None) -> Path | None:
        """Drops what a resumed run will do again; the dropped lines are kept in ``recovery-tails/``.

        Args:
            step: the checkpoint's step. Without ``offset``, the lines of later steps go, wherever they stand.
            offset: the checkpoint's ``metrics_bytes``: exactly what lies behind it goes.

        Returns:
            The file with the dropped lines; None where nothing was dropped.

        Raises:
            RunFailed: ``offset`` is not behind a whole line, or lies behind a line of a later step.
        """
        read = read_metrics(self.path)
        if offset is not None:
            check_offset(self.path, read, step, offset)
        keep = [
            line.step <= step if offset is None else end <= offset
            for line, end in zip(read.lines, read.offsets, strict=True)
        ]
        if all(keep):
            return None
        data = self.path.read_bytes()
        raw = [data[begin:end] for begin, end in pairwise((0, *read.offsets))]
        self._file.close()
        dropped = compress(raw, (not stays for stays in keep))
        tail = self._replace(b"".join(compress(raw, keep)), b"".join(dropped), f"from-step-{step + 1}")
        self._index(tuple(compress(read.lines, keep)))
        self._file = self.path.open("ab")
        return tail

    def _replace(self, kept: bytes, dropped: bytes, why: str) -> Path:
        tail = free_name(self.path.parent / TAIL_FOLDER, f"metrics-{why}.jsonl")
        write_atomic(tail, dropped)  # before the log loses it
        write_atomic(self.path, kept)
        return tail

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()


def check_offset(path: Path, read: MetricsRead, step: int, offset: int) -> None:
    """Refuses a byte offset at which no log of ``step`` steps can end."""
    if offset not in (0, *read.offsets):
        raise RunFailed(f"{path}: byte {offset} of step {step}'s checkpoint is not behind a whole line: damaged")
    late = [line.step for line, end in zip(read.lines, read.offsets, strict=True) if end <= offset and line.step > step]
    if late:
        raise RunFailed(
            f"{path}: a line of step {late[0]} lies before byte {offset} of step {step}'s checkpoint: damaged"
        )


def encode_line(line: MetricLine) -> bytes:
    """A line as it stands in the file, newline included."""
    value = {"step": line.step, "time_s": line.time_s, "metrics": line.metrics, "counts": line.counts}
    return (json.dumps(value, allow_nan=False) + "\n").encode()


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a log may hold")
