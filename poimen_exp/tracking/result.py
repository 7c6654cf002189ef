"""How a run ended: ``result.json``, the last file that a run writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from poimen_exp.errors import RunFailed
from poimen_exp.tracking.files import read_json, write_json

Status = Literal["converged", "completed", "stopped", "failed", "interrupted"]
"""``converged``: patience ran out. ``completed``: every step was done. ``stopped``: a collapse stop. The last two of
the five never finished their work."""

OBJECTIVE = "val/reward/total"
GOOD: frozenset[Status] = frozenset({"converged", "completed"})
"""The statuses that exit with 0."""


@dataclass(frozen=True)
class RunResult:
    """The end of a run.

    Attributes:
        objective_value: of the best validation; None where there was none.
        step: last step done.
        best_step: step of the best validation; None where there was none.
        adapter: PEFT folder, if one was exported; its ``poimen.json`` says of which step.
    """

    status: Status
    objective_name: str = OBJECTIVE
    objective_value: float | None = None
    step: int = 0
    best_step: int | None = None
    adapter: Path | None = None

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise RunFailed(f"status of a run: got {self.status!r}, expected one of {', '.join(get_args(Status))}")
        if self.objective_value is not None and not math.isfinite(self.objective_value):
            raise RunFailed(f"{self.objective_name}: got {self.objective_value}, expected a finite number or none")


def write_result(path: Path, result: RunResult) -> None:
    """Writes ``result.json`` atomically; an adapter inside the run folder is named relative to it."""
    adapter = result.adapter
    if adapter is not None and adapter.is_absolute() and adapter.is_relative_to(path.parent.absolute()):
        adapter = adapter.relative_to(path.parent.absolute())
    elif adapter is not None and not adapter.is_absolute() and adapter.is_relative_to(path.parent):
        adapter = adapter.relative_to(path.parent)
    write_json(
        path,
        {
            "status": result.status,
            "objective": {"name": result.objective_name, "value": result.objective_value},
            "step": result.step,
            "best_step": result.best_step,
            "adapter": None if adapter is None else str(adapter),
        },
    )


def read_result(path: Path) -> RunResult | None:
    """The result of a run; None where the run did not finish.

    Raises:
        RunFailed: there is a file, but not of this form.
    """
    if not path.exists():
        return None
    data: Any = read_json(path)
    try:
        value, adapter = data["objective"]["value"], data["adapter"]
        return RunResult(
            status=data["status"],
            objective_name=data["objective"]["name"],
            objective_value=None if value is None else float(value),
            step=int(data["step"]),
            best_step=None if data["best_step"] is None else int(data["best_step"]),
            adapter=None if adapter is None else path.parent / adapter,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunFailed(f"{path}: damaged: {error!r}; expected status, objective, step, best_step, adapter") from error
