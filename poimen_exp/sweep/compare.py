"""The numbers of a report: a table per setting, paired differences, and the verdict on collapse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from poimen_exp.errors import Refused
from poimen_exp.sweep.records import OBJECTIVE, RunRecord, Setting, SweepRuns, label
from poimen_exp.sweep.stats import Estimate, paired_difference, t_interval
from poimen_exp.tracking.progress import TABLE_METRICS as RESULT_METRICS
from poimen_exp.wording import counted

At = Literal["last", "best"]
"""The validation that a run is judged by: its last one, or the one with the best ``val/reward/total``."""

EVIDENCE_FREE = "gates/update_accuracy/evidence_free"
_LABELS = {f"val/{name}": label for name, label in RESULT_METRICS}
TABLE_METRICS: tuple[tuple[str, str], ...] = (
    *((name, _LABELS[name]) for name in (
        OBJECTIVE, "val/gates/update_accuracy/evidence_present", f"val/{EVIDENCE_FREE}", "val/gates/exit/exact",
        "val/gates/exit/early", "val/gates/exit/late", "val/gates/format_correct",
    )),
    ("val/response_length/mean", "response length, mean tokens"),
)  # fmt: skip
_TABLE_NAMES = frozenset(name for name, _ in TABLE_METRICS)
COLLAPSE_DROP = 0.10
"""Evidence-free accuracy that falls by more than this from a run's start to its end is a collapse."""
REFERENCE_ALPHA = "0.9"
"""The paper's alpha: what the others are compared with where nothing else is asked for."""


@dataclass(frozen=True)
class Row:
    """One setting: name of a metric to its estimate over seeds; a metric that no run has is absent.

    ``counts``: what the metric's denominator counts, summed over the seeds.
    """

    setting: Setting
    estimates: dict[str, Estimate]
    seeds: tuple[int, ...]
    counts: dict[str, int]


@dataclass(frozen=True)
class Comparison:
    """``second - first`` for each metric, paired by seed."""

    first: Setting
    second: Setting
    differences: dict[str, Estimate]


@dataclass(frozen=True)
class Collapse:
    """Evidence-free accuracy of a setting from start to end, means over its seeds, and how many seeds fell."""

    setting: Setting
    start: float
    end: float
    fallen: int
    n: int

    @property
    def collapsed(self) -> bool:
        """Whether the mean fell by more than ``COLLAPSE_DROP``."""
        return self.start - self.end > COLLAPSE_DROP


def common_step(runs: Sequence[RunRecord]) -> int:
    """The last step at which every run that has begun to validate has a validation.

    Raises:
        Refused: no run has one.
    """
    validated = [set(run.series(OBJECTIVE)) for run in runs]
    shared = set.intersection(*(steps for steps in validated if steps)) if any(validated) else set()
    if not shared:
        raise Refused("no step was validated by every run so far: wait for one, or leave --partial out")
    return max(shared)


def table(runs: Sequence[RunRecord], settings: Sequence[Setting], at: At, until: int | None) -> tuple[Row, ...]:
    """One row a setting, also for one without a run that counts.

    Args:
        until: validations after this step are not looked at; None for all.
    """
    rows = []
    for setting in settings:
        chosen = [run for run in runs if run.setting == setting]
        values = {run.seed: _values(run, at, until) for run in chosen}
        counts = Counter[str]()
        for run in chosen:
            counts.update(_counts(run, at, until))
        estimates = {}
        for name, _ in TABLE_METRICS:
            present = [per_run[name] for per_run in values.values() if name in per_run]
            if present:
                estimates[name] = t_interval(present)
        rows.append(Row(setting, estimates, tuple(sorted(values)), dict(counts)))
    return tuple(rows)


def compare(runs: Sequence[RunRecord], first: Setting, second: Setting, at: At, until: int | None) -> Comparison:
    """The paired differences of two settings."""
    sides = [{r.seed: _values(r, at, until) for r in runs if r.setting == setting} for setting in (first, second)]
    differences = {}
    for name, _ in TABLE_METRICS:
        one, two = ({seed: v[name] for seed, v in side.items() if name in v} for side in sides)
        difference = paired_difference(one, two)
        if difference is not None:
            differences[name] = difference
    return Comparison(first, second, differences)


def pairs(runs: SweepRuns, asked: tuple[str, str] | None) -> tuple[tuple[Setting, Setting], ...]:
    """The two settings that were asked for, by their alpha; else each one against alpha 0.9 or the first."""
    settings = runs.settings
    if asked is not None:
        return ((_with_alpha(settings, asked[0]), _with_alpha(settings, asked[1])),)
    reference = next((s for s in settings if dict(s)["alpha"] == REFERENCE_ALPHA), settings[0])
    return tuple((reference, setting) for setting in settings if setting != reference)


def collapses(runs: Sequence[RunRecord]) -> tuple[Collapse, ...]:
    """Evidence-free accuracy of each setting from start to end.

    A run that validated before its first step is read from its validations; one that did not, from its training
    rollouts, whose first ones are the untrained policy's.
    """
    found = []
    for setting in dict.fromkeys(run.setting for run in runs):
        ends = [e for e in (_start_and_end(run) for run in runs if run.setting == setting) if e is not None]
        if ends:
            start, end = (sum(side) / len(ends) for side in zip(*ends, strict=True))
            fallen = sum(a - b > COLLAPSE_DROP for a, b in ends)
            found.append(Collapse(setting, start, end, fallen, len(ends)))
    return tuple(found)


def verdict(found: Sequence[Collapse], runs: Sequence[RunRecord] = ()) -> str:
    """One line: which settings collapsed on evidence-free chunks, and the numbers of all."""
    logged = {name for run in runs for line in run.lines for name in line.metrics}
    if logged and not any("/gates/" in name for name in logged):
        return "Evidence-free collapse: not looked for, these runs train no gates."
    if not found:
        return "Evidence-free collapse: no run has recorded evidence-free update accuracy yet."
    fallen = [label(c.setting) for c in found if c.collapsed]
    head = f"collapsed at {'; '.join(fallen)}" if fallen else "no setting collapsed"
    numbers = "; ".join(
        f"{label(c.setting)}: {c.start:.3f} -> {c.end:.3f}, fell in {c.fallen} of {counted(c.n, 'seed')}" for c in found
    )
    return f"Evidence-free collapse (update accuracy falls by more than {COLLAPSE_DROP:.2f}): {head}. {numbers}."


def _values(run: RunRecord, at: At, until: int | None) -> dict[str, float]:
    """The table's metrics of a run at the validation it is judged by."""
    step = _judged_at(run, at, until)
    values = {name: run.series(name) for name, _ in TABLE_METRICS}
    return {name: series[step] for name, series in values.items() if step in series}


def _counts(run: RunRecord, at: At, until: int | None) -> dict[str, int]:
    """Denominators of the table's metrics at that validation."""
    step = _judged_at(run, at, until)
    return {n: c for line in run.lines if line.step == step for n, c in line.counts.items() if n in _TABLE_NAMES}


def _judged_at(run: RunRecord, at: At, until: int | None) -> int | None:
    rewards = {s: v for s, v in run.series(OBJECTIVE).items() if until is None or s <= until}
    if not rewards:
        return None
    return max(rewards) if at == "last" else max(rewards, key=lambda s: (rewards[s], -s))


def _start_and_end(run: RunRecord) -> tuple[float, float] | None:
    series = run.series(f"val/{EVIDENCE_FREE}")
    if 0 not in series:
        series = run.series(f"train/{EVIDENCE_FREE}") or series
    if len(series) < 2:
        return None
    values = list(series.values())
    return values[0], values[-1]


def _with_alpha(settings: Sequence[Setting], alpha: str) -> Setting:
    try:
        wanted = float(alpha)
    except ValueError:
        raise Refused(f"--compare: got {alpha!r}, expected two numbers, as --compare 0.9 1.0") from None
    found = [s for s in settings if float(dict(s)["alpha"]) == wanted]
    if len(found) != 1:
        known = ", ".join(label(s) for s in settings)
        raise Refused(f"--compare: {len(found)} settings have alpha {alpha}, expected one; the sweep has {known}")
    return found[0]
