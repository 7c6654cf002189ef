"""``poimen inspect RUN``: what a run did, told only after its files were verified."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from poimen_exp.errors import Refused, RunFailed
from poimen_exp.tracking.files import read_json
from poimen_exp.tracking.integrity import Integrity, verify_run
from poimen_exp.tracking.metric_names import denominator_in
from poimen_exp.tracking.metrics_log import MetricLine, by_step
from poimen_exp.tracking.progress import best_validation, format_duration, results_table
from poimen_exp.tracking.result import OBJECTIVE
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.trajectories import RolloutRecord
from poimen_exp.wording import size, wide_console

SCHEMA = "poimen.inspection/1"
_ACCURACIES = ("gates/update_accuracy/evidence_present", "gates/update_accuracy/evidence_free", "gates/exit/exact")


@dataclass
class Spread:
    """Mean, extremes and the share of zeros of numbers seen one by one; None where there were none."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    zeros: int = 0

    def add(self, value: float) -> None:
        """Takes one more number."""
        self.n += 1
        self.total += value
        self.squares += value * value
        self.low, self.high = min(self.low, value), max(self.high, value)
        self.zeros += value == 0

    def summary(self) -> dict[str, float | int] | None:
        """The statistics; ``std`` is the population's."""
        if self.n == 0:
            return None
        mean = self.total / self.n
        std = math.sqrt(max(0.0, self.squares / self.n - mean * mean))
        zero = self.zeros / self.n
        return {"n": self.n, "mean": mean, "std": std, "min": self.low, "max": self.high, "zero_share": zero}


class RolloutStatistics:
    """Counts over the rollouts of training: those of validations are counted, and in nothing else."""

    def __init__(self) -> None:
        self.rollouts = self.failed = self.turns = self.prompt_tokens = self.response_tokens = 0
        self.validation_rollouts = 0
        self.advantage = Spread()

    def add(self, path: Path, record: RolloutRecord) -> None:
        """Takes a rollout of the file ``path``."""
        if path.name.startswith("val_"):
            self.validation_rollouts += 1
            return
        self.rollouts += 1
        self.failed += record.failed is not None
        self.turns += len(record.turns)
        for turn in record.turns:
            self.prompt_tokens += turn.prompt_tokens
            self.response_tokens += len(turn.response_ids)
            if turn.advantage is not None:
                self.advantage.add(turn.advantage)


def inspect_run(path: Path) -> dict[str, Any]:
    """The inspection of a run, in the shape that ``--json`` prints.

    ``ok`` False: files are damaged; then ``damaged`` names them and there are no statistics.

    Raises:
        Refused: no run lies at ``path``.
    """
    if not (path / "metrics.jsonl").exists() and (path / "0").is_dir():
        raise Refused(f"{path}: a folder of several runs; give one of them, for example {path / '0'}")
    folder = RunFolder.open(path, "read")
    statistics = RolloutStatistics()
    found, read = verify_run(folder, statistics.add)
    report = _verdict(folder, found)
    if not found.damaged:
        report |= _report(folder, read.lines, statistics)
    return report


def _verdict(folder: RunFolder, found: Integrity) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run": str(folder.path),
        "ok": not found.damaged,
        "verified_files": found.verified,
        "damaged": [asdict(finding) for finding in found.damaged],
        "notes": found.notes,
    }


def _report(folder: RunFolder, lines: tuple[MetricLine, ...], statistics: RolloutStatistics) -> dict[str, Any]:
    steps = by_step(lines)
    result = folder.read_result()
    provenance = folder.read_provenance() or {}
    best = best_validation(lines) if result is None else result.best_step
    return {
        "status": None if result is None else result.status,
        "device": provenance.get("device"),
        "corpus": provenance.get("corpus"),
        "counters": {
            "last_step": max(steps, default=None),
            "validations": sum(OBJECTIVE in line.metrics for line in steps.values()),
            "checkpoints": list(folder.checkpoint_steps()),
            "optimizer_steps_skipped": sum(int(line.metrics.get("update/skipped", 0)) for line in steps.values()),
            "rollouts": statistics.rollouts,
            "rollouts_failed": statistics.failed,
            "validation_rollouts": statistics.validation_rollouts,
            "turns": statistics.turns,
            "prompt_tokens": statistics.prompt_tokens,
            "response_tokens": statistics.response_tokens,
        },
        "rewards": {
            name: _first_best_last(steps, name, best if name.startswith("val/") else None)
            for name in sorted({name for line in lines for name in line.metrics if "/reward/" in name})
        },
        "gates": {
            name: found["last"]
            for name in (f"{side}/{metric}" for side in ("train", "val") for metric in _ACCURACIES)
            if (found := _first_best_last(steps, name, None))
        },
        "advantages": statistics.advantage.summary(),
        "memory": {
            "predicted_gb": _predicted(folder),
            "peak_device_gb": _peak(lines, "perf/max_memory_allocated_gb"),
            "peak_host_gb": _peak(lines, "perf/cpu_memory_used_gb"),
            "memory_tokens": _first_best_last(steps, "train/gates/memory_tokens", None),
        },
        "times": _times(lines),
    }


def _first_best_last(steps: Mapping[int, MetricLine], name: str, best: int | None) -> dict[str, Any]:
    having = [step for step, line in steps.items() if name in line.metrics]
    chosen = {"first": having[0], "best": best, "last": having[-1]} if having else {}
    return {
        word: {"step": step, "value": steps[step].metrics[name], "n": steps[step].counts.get(name)}
        for word, step in chosen.items()
        if step is not None and name in steps[step].metrics
    }


def _predicted(folder: RunFolder) -> float | None:
    """Peak of the device's memory as the plan predicted it, in GB of 2^30 bytes; None where it did not."""
    estimate = (read_json(folder.plan) if folder.plan.exists() else {}).get("estimate")
    return None if estimate is None else float(estimate["memory"]["peak"]) / 2**30


def _peak(lines: Iterable[MetricLine], name: str) -> float | None:
    return max((line.metrics[name] for line in lines if name in line.metrics), default=None)


def _times(lines: tuple[MetricLine, ...]) -> dict[str, Any]:
    phases: dict[str, list[float]] = {}
    for line in lines:
        for name, seconds in line.metrics.items():
            if name.startswith("timing_s/"):
                phases.setdefault(name, []).append(seconds)
    totals = {
        name: {"n": len(values), "total_s": sum(values), "mean_s": sum(values) / len(values)}
        for name, values in sorted(phases.items())
    }
    return {"wall_s": lines[-1].time_s if lines else None, "phases": totals}


def run_inspect(path: Path, as_json: bool, console: Console | None = None) -> None:
    """Prints the inspection of a run.

    Raises:
        RunFailed: a damaged file; it was named before.
    """
    report = inspect_run(path)
    if as_json:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print(report, path, wide_console() if console is None else console)
    if not report["ok"]:
        first = report["damaged"][0]
        raise RunFailed(f"{path}: {len(report['damaged'])} damaged, first {first['file']}: {first['problem']}")


def _print(report: Mapping[str, Any], path: Path, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"{report['run']}: {report['verified_files']} files verified, {len(report['damaged'])} damaged")
    for note in report["notes"]:
        say(f"note: {note}")
    for finding in report["damaged"]:
        say(f"damaged: {finding['file']}: {finding['problem']}")
    if not report["ok"]:
        return
    say(f"status: {report['status'] or 'not finished'}")
    for name, value in report["counters"].items():
        say(f"{name.replace('_', ' ')}: {_number(value)}")
    lines = RunFolder.open(path, "read").read_lines()
    logged = {name for line in lines for name in line.metrics}
    gates = {name: {"last": at} for name, at in report["gates"].items()}
    for name, spread in (report["rewards"] | gates).items():
        unit = denominator_in(name, logged)
        values = (
            f"{word} {at['value']:.3f} (n {_number(at['n'])} {unit}, step {at['step']})" for word, at in spread.items()
        )
        say(f"{name}: {', '.join(values)}")
    if report["advantages"] is not None:
        say("advantages of turns: " + ", ".join(f"{name} {_number(x)}" for name, x in report["advantages"].items()))
    peak = report["memory"]["peak_device_gb"]
    predicted = report["memory"]["predicted_gb"]
    told = "" if predicted is None else f" (predicted {size(predicted * 2**30)})"
    say(f"device memory, peak: {'not measured' if peak is None else size(peak * 2**30)}{told}")
    for name, phase in report["times"]["phases"].items():
        say(f"{name}: {format_duration(phase['total_s'])} in all, {phase['mean_s']:.2f} s each (n {phase['n']})")
    table = results_table(lines)
    if table is not None:
        console.print(table)


def _number(value: Any) -> str:
    """Counts as ``11,050``, other numbers with four digits, anything else as it is."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
