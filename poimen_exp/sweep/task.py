"""A run as a trial: what it raises is written into its folder, and what it returns is a number."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from poimen_exp.errors import RunFailed

ERROR_FILE = "error.txt"


@dataclass(frozen=True)
class TrialTask:
    """Hydra's task function, wrapped: it runs where the launcher runs it, also in another process."""

    task: Callable[[DictConfig], Any]

    def __call__(self, config: DictConfig) -> float:
        from hydra.core.hydra_config import HydraConfig

        folder = Path(HydraConfig.get().runtime.output_dir)
        try:
            return finite(self.task(config))
        except Exception as error:
            write_error(folder, error)
            raise
        except SystemExit as error:
            # Let through, it would end the whole sweep.
            failure = RunFailed(f"the run ended its process with exit code {error.code}")
            write_error(folder, error)
            raise failure from error


def finite(value: Any) -> float:
    """The value of a run.

    Raises:
        RunFailed: None, NaN, infinity, or no number: a trial without a value is a failed one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RunFailed(f"the run returned {value!r}, expected a finite number: the best val/reward/total")
    return float(value)


def write_error(folder: Path, error: BaseException) -> None:
    """Writes the traceback into the trial's folder, unless one lies there from nearer to the cause."""
    path = folder / ERROR_FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
