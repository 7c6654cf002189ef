"""What a sweep reads of ``hydra.sweeper`` and ``sweep``, as typed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from omegaconf import DictConfig, OmegaConf

from poimen_exp.errors import Refused

Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class SweepSettings:
    """Fields carry the names of their keys."""

    direction: Direction
    params: Mapping[str, Any]
    n_trials: int
    n_jobs: int | None
    seed: int
    storage: str | None
    """Optuna URL, or ``journal://PATH``; None: SQLite in the sweep's folder."""
    resume: Path | None


def read_settings(sweeper: Mapping[str, Any], config: DictConfig) -> SweepSettings:
    """The settings of a sweep.

    Args:
        sweeper: what Hydra hands to the plugin: the keys of ``hydra.sweeper``.
        config: the composed configuration, for ``sweep.storage`` and ``sweep.resume``.
    """
    direction = sweeper["direction"]
    if direction not in ("maximize", "minimize"):
        raise Refused(f"hydra.sweeper.direction: got {direction!r}, expected maximize or minimize")
    _at_least_one("n_trials", sweeper["n_trials"])
    if sweeper["n_jobs"] is not None:
        _at_least_one("n_jobs", sweeper["n_jobs"])
    resume = OmegaConf.select(config, "sweep.resume")
    return SweepSettings(
        direction=cast(Direction, direction),
        params=dict(sweeper["params"] or {}),
        n_trials=int(sweeper["n_trials"]),
        n_jobs=sweeper["n_jobs"],
        seed=int(sweeper["seed"]),
        storage=OmegaConf.select(config, "sweep.storage"),
        resume=None if resume is None else Path(resume),
    )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise Refused(f"hydra.sweeper.{name}: got {value}, expected 1 or more")
