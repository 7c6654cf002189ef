"""Hydra's door to ``poimen_exp.sweep``. Hydra imports this module at each start: Optuna is imported by a sweep only."""

# No `from __future__ import annotations`: Hydra runs this file before it is in sys.modules, and @dataclass looks there.

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class PoimenSweeperConf:
    """Keys of ``hydra.sweeper``; where trials are stored and what is resumed stand in ``sweep.*``."""

    _target_: str = "hydra_plugins.poimen_sweeper.sweeper.PoimenSweeper"
    direction: str = "maximize"
    """Of the value a run returns: maximize | minimize. The one place where it is declared."""
    params: dict[str, Any] = field(default_factory=dict)
    """Swept keys of a sweep group: KEY: "0.9,1.0" or "interval(0.5, 1.0)"; the command line wins."""
    n_trials: int = 20
    """Values sampled from intervals; each runs once for every combination of the listed values."""
    n_jobs: int | None = None
    """Trials given to the launcher at once; null: 1 for the basic launcher and for intervals, else the whole grid."""
    seed: int = 0
    """Of the sampler."""


class PoimenSweeper(Sweeper):
    """A grid over listed values, TPE over intervals, behind the gate check."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps what Hydra gives; the launcher is made by ``sweep``, when the folder is known."""
        self._given = (hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> Any:
        """Runs what is missing of the sweep; the best value, or None."""
        from poimen_exp.sweep.run import run_sweep
        from poimen_exp.sweep.settings import read_settings

        context, task, config = self._given
        return run_sweep(read_settings(self.settings, config), context, task, config, arguments)


ConfigStore.instance().store(group="hydra/sweeper", name="poimen", node=PoimenSweeperConf, provider="poimen_exp")
