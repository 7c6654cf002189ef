"""The runs of a sweep as the report sees them: their metrics.jsonl, and which of them count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from poimen_exp.errors import Refused
from poimen_exp.sweep.space import bare_key
from poimen_exp.tracking.files import read_json, write_json
from poimen_exp.tracking.metrics_log import MetricLine, read_metrics
from poimen_exp.tracking.result import GOOD, RunResult, read_result

TRIALS_FILE = "trials.json"
OBJECTIVE = "val/reward/total"
Setting = tuple[tuple[str, str], ...]
"""Swept keys but the seed, and their values as text: what a row of the report stands for."""


@dataclass(frozen=True)
class RunRecord:
    """One run of a sweep."""

    folder: Path
    setting: Setting
    seed: int
    lines: tuple[MetricLine, ...]
    result: RunResult | None

    @property
    def ended(self) -> bool:
        """Whether the run is whole: a stop on collapse is an end too, a failure is none."""
        return self.result is not None and self.result.status in GOOD | {"stopped"}

    @property
    def last_step(self) -> int:
        """Last step in the record; 0 before the first."""
        return max((line.step for line in self.lines), default=0)

    def series(self, name: str) -> dict[int, float]:
        """Step to value, by step; a step that was repeated after a resume has its last value."""
        found = {line.step: line.metrics[name] for line in self.lines if name in line.metrics}
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class SweepRuns:
    """What a sweep's folder holds.

    ``missing``: slots that no ended run fills. ``expected``: slots of the sweep; 0 where no sweep wrote them down.
    """

    folder: Path
    runs: tuple[RunRecord, ...]
    missing: tuple[str, ...]
    expected: int

    @property
    def ended(self) -> tuple[RunRecord, ...]:
        """The runs that count in a table."""
        return tuple(run for run in self.runs if run.ended)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Every setting with a run, numbers in numerical order."""
        return tuple(sorted({run.setting for run in self.runs}, key=_setting_order))


def label(setting: Setting) -> str:
    """``alpha 0.9`` or ``alpha 0.9, lora rank32``."""
    return ", ".join(f"{key} {value}" for key, value in setting)


def write_trials(folder: Path, slots: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes ``trials.json``: the slots of the sweep (of earlier commands too) and its trials."""
    path = folder / TRIALS_FILE
    earlier = read_json(path)["slots"] if path.exists() else []
    write_json(path, {"slots": list(dict.fromkeys([*earlier, *slots])), "trials": list(rows)})


def load_sweep(folder: Path) -> SweepRuns:
    """The runs in a sweep's folder, one for each setting and seed: the ended one, or the one that came furthest.

    Raises:
        Refused: no run lies there.
    """
    folders = sorted((path for path in _job_folders(folder)), key=lambda path: _number(path.name))
    if not folders:
        if (folder / "resolved.yaml").is_file():
            raise Refused(f"{folder}: a single run, expected the folder around it: {folder.absolute().parent}")
        raise Refused(f"{folder}: no run lies here; expected a sweep's folder, multirun/<experiment>/<time>")
    swept = tuple(read_json(folder / "sweep.json")["swept"]) if (folder / "sweep.json").is_file() else ()
    best: dict[tuple[Setting, int], RunRecord] = {}
    for path in folders:
        run = _load_run(path, swept)
        kept = best.get((run.setting, run.seed))
        if kept is None or (run.ended, run.last_step) >= (kept.ended, kept.last_step):
            best[run.setting, run.seed] = run
    expected, missing = _slots(folder)
    return SweepRuns(folder, tuple(best.values()), missing, expected)


def _job_folders(folder: Path) -> list[Path]:
    """Folders of runs that began; Hydra writes their overrides last."""
    return [path.parent.parent for path in folder.glob("*/.hydra/overrides.yaml")]


def _number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (10**9, name)


def _load_run(folder: Path, swept: tuple[str, ...]) -> RunRecord:
    config = OmegaConf.load(folder / ".hydra" / "config.yaml")
    lines_given = [str(line) for line in OmegaConf.load(folder / ".hydra" / "overrides.yaml")]
    given = dict(_split(line) for line in lines_given if "=" in line)
    keys = sorted({"alpha", *swept} - {"seed"})
    setting = tuple((key, str(given[key] if key in given else OmegaConf.select(config, key))) for key in keys)
    seed = OmegaConf.select(config, "seed")
    result = read_result(folder / "result.json")  # before the metrics: a run that is read as ended has all of them
    return RunRecord(folder, setting, int(seed), read_metrics(folder / "metrics.jsonl").lines, result)


def _split(line: str) -> tuple[str, str]:
    key, _, value = line.partition("=")
    return bare_key(key), value


def _slots(folder: Path) -> tuple[int, tuple[str, ...]]:
    if not (folder / TRIALS_FILE).is_file():
        return 0, ()
    data = read_json(folder / TRIALS_FILE)
    filled = {trial["slot"] for trial in data["trials"] if trial["state"] == "complete"}
    return len(data["slots"]), tuple(slot for slot in data["slots"] if slot not in filled)


def _setting_order(setting: Setting) -> tuple[tuple[str, float, str], ...]:
    return tuple((key, _as_number(value), value) for key, value in setting)


def _as_number(text: str) -> float:
    return float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", text) else float("inf")
