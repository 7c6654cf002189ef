"""The folder of one run: where each file lies, who may write it, and what survives a kill."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from poimen_exp.errors import Refused
from poimen_exp.tracking.files import free_name, read_json, write_atomic, write_json
from poimen_exp.tracking.lock import FolderLock, Holder, live_holder
from poimen_exp.tracking.metrics_log import TAIL_FOLDER, MetricLine, MetricsLog, read_metrics
from poimen_exp.tracking.provenance import Provenance
from poimen_exp.tracking.result import RunResult, read_result, write_result
from poimen_exp.tracking.sums import drop_sums

Access = Literal["read", "resume", "attach"]
"""``read``: look only. ``resume``: take the lock and go on with the run. ``attach``: write for the process that holds
the lock (a Ray worker of it)."""

_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_TRAJECTORY_FILE = re.compile(r"(?:step|val)_(\d+)\.jsonl")


class RunFolder:
    """Paths and life of a run folder. Make one with ``create`` or ``open``; close it, or use ``with``.

    Attributes:
        path: the folder, absolute.
        stale: the process that held the folder and died, if its lock was taken over.
    """

    def __init__(self, path: Path, lock: FolderLock | None) -> None:
        self.path, self._lock = path, lock
        self.stale: Holder | None = None if lock is None else lock.stale
        self.hydra = path / ".hydra"
        self.resolved = path / "resolved.yaml"
        self.provenance = path / "provenance.json"
        self.plan = path / "plan.json"
        self.gate_check = path / "gate_check.json"
        self.metrics = path / "metrics.jsonl"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.adapter = path / "adapter"
        self.result = path / "result.json"
        self.recovery_tails = path / TAIL_FOLDER
        self.wandb = path / "wandb"
        self.wandb_id = path / "wandb_run_id"

    @classmethod
    def create(cls, path: Path) -> Self:
        """A folder for a new run, locked. What Hydra put there already (``.hydra/``, its log) may stay.

        Raises:
            Refused: a run lies there, finished or not, or a live process holds it.
        """
        path = Path(path).absolute()
        if path.exists() and not path.is_dir():
            raise Refused(f"{path}: a file, expected a folder for the run")
        path.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(path)
        try:
            _refuse_if_used(path)
        except Refused:
            lock.release()
            raise
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path, access: Access) -> Self:
        """The folder of an existing run.

        ``resume`` moves an earlier ``result.json`` to ``recovery-tails/``: until it ends again, the run has not.

        Raises:
            Refused: no run lies there; ``resume`` while a live process holds it; ``attach`` while none does.
        """
        path = Path(path).absolute()
        if not used_names(path):
            raise Refused(f"{path}: no run lies here; expected a folder with resolved.yaml and metrics.jsonl")
        if access == "attach" and live_holder(path) is None:
            raise Refused(f"{path}: no process holds this run; open it with 'resume' to write to it")
        if access != "resume":
            return cls(path, None)
        folder = cls(path, FolderLock(path))
        if folder.result.exists():
            folder.recovery_tails.mkdir(exist_ok=True)
            folder.result.rename(free_name(folder.recovery_tails, "result.json"))
        return folder

    @property
    def run_id(self) -> str:
        """Finds the run again: its path below ``multirun/``; elsewhere the folder's name, the last two of a number."""
        parts = self.path.parts
        if "multirun" in parts[:-1]:
            return "/".join(parts[len(parts) - parts[::-1].index("multirun") :])
        return "/".join(parts[-2:] if self.path.name.isdigit() else parts[-1:])

    def checkpoint(self, step: int) -> Path:
        """Folder of a step's checkpoint; complete when its ``manifest.json`` is there."""
        return self.checkpoints / f"global_step_{step}"

    def checkpoint_steps(self, *, complete: bool = True) -> tuple[int, ...]:
        """Steps that have a checkpoint with a manifest (or, with ``complete=False``, one without), ascending."""
        steps = sorted(_numbered(self.checkpoints, _STEP_FOLDER).values())
        return tuple(n for n in steps if (self.checkpoint(n) / "manifest.json").is_file() == complete)

    def trajectory_file(self, step: int, side: Literal["train", "val"] = "train") -> Path:
        """File of the rollouts of a step, or of its validation."""
        return self.trajectories / f"{'step' if side == 'train' else 'val'}_{step}.jsonl"

    def trajectory_files(self) -> dict[Path, int]:
        """Every file of rollouts with its step, by step, validations behind training."""
        found = _numbered(self.trajectories, _TRAJECTORY_FILE)
        return dict(sorted(found.items(), key=lambda item: (item[1], item[0].name)))

    def write_resolved(self, text: str) -> None:
        """Writes the resolved configuration (YAML)."""
        write_atomic(self.resolved, text.encode())

    def write_provenance(self, provenance: Provenance) -> None:
        """Writes ``provenance.json``. A resumed run keeps the first one beside it, numbered."""
        if self.provenance.exists():
            self.provenance.rename(free_name(self.path, "provenance-before-resume.json"))
        write_json(self.provenance, provenance.to_json())

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Writes ``plan.json``: ``{"verl": version, "fields": [...]}``."""
        write_json(self.plan, dict(plan))

    def write_gate_check(self, report: Mapping[str, Any]) -> None:
        """Writes ``gate_check.json``."""
        write_json(self.gate_check, dict(report))

    def write_result(self, result: RunResult) -> None:
        """Writes ``result.json``: call it when everything else is written."""
        write_result(self.result, result)

    def read_result(self) -> RunResult | None:
        """How the run ended; None while it has not."""
        return read_result(self.result)

    def read_provenance(self) -> Mapping[str, Any] | None:
        """Content of ``provenance.json``; None where it is not there."""
        return dict(read_json(self.provenance)) if self.provenance.exists() else None

    def read_lines(self) -> tuple[MetricLine, ...]:
        """The lines of ``metrics.jsonl``; a line that a killed process did not finish is left out."""
        return read_metrics(self.metrics).lines

    def rewind(self, log: MetricsLog, step: int, metrics_bytes: int) -> tuple[Path, ...]:
        """Brings log, trajectories and checkpoints back to one checkpoint; what goes is kept in ``recovery-tails/``.

        Returns:
            The files that now hold what was dropped.
        """
        tail = log.truncate_to(step, metrics_bytes)
        moved = [] if tail is None else [tail]
        numbered = {**self.trajectory_files(), **_numbered(self.checkpoints, _STEP_FOLDER)}
        late = [path for path, number in numbered.items() if number > step]
        drop_sums(self.trajectories, {path.name for path in late})  # first: a kill here leaves files without a hash
        for path in late:
            self.recovery_tails.mkdir(exist_ok=True)
            moved.append(path.rename(free_name(self.recovery_tails, f"{path.parent.name}-{path.name}")))
        return tuple(moved)

    def close(self) -> None:
        """Frees the lock; a second call does nothing."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def used_names(path: Path) -> tuple[str, ...]:
    """Which files of a run lie in ``path``; empty where none was begun there."""
    plain = RunFolder(path, None)
    marks = (plain.resolved, plain.provenance, plain.plan, plain.metrics, plain.trajectories, plain.checkpoints)
    return tuple(mark.name for mark in (*marks, plain.adapter, plain.result) if mark.exists())


def _refuse_if_used(path: Path) -> None:
    names = used_names(path)
    if names:
        raise Refused(
            f"{path}: already holds a run ({', '.join(names)}), which is never overwritten; "
            f"go on with it: poimen resume {path} - or choose another folder: hydra.run.dir=DIR"
        )


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[Path, int]:
    entries = folder.iterdir() if folder.is_dir() else ()
    return {entry: int(match[1]) for entry in entries if (match := pattern.fullmatch(entry.name))}
