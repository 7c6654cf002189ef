"""What ``tracking`` of the configuration means, as typed values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from poimen_exp.errors import Refused

WandbMode = Literal["offline", "online", "disabled"]


@dataclass(frozen=True)
class TrackingSettings:
    """The keys under ``tracking``.

    Attributes:
        wandb: ``offline`` writes the copy into the run folder; ``online`` sends it; ``disabled`` makes none.
        group: runs of one comparison; None for the folder above the run folder (the sweep, or the single run's time).
        name: of the run in W&B; None for the group and the job's number.
        trajectory_freq: rollouts of every n-th step are written to ``trajectories/``; 0 writes none.
    """

    wandb: WandbMode = "offline"
    project: str = "poimen"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    job_type: str = "train"
    tags: tuple[str, ...] = ()
    trajectory_freq: int = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TrackingSettings:
        """Checks and types the ``tracking`` mapping of the composed configuration.

        Raises:
            Refused: an unknown key, an unknown mode, a negative frequency.
        """
        known = {field.name for field in fields(cls)}
        for key in config:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean tracking.{near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
                raise Refused(f"tracking.{key}: no such key{hint}")
        settings = cls(**{**config, "tags": tuple(str(tag) for tag in config.get("tags") or ())})
        if settings.wandb not in get_args(WandbMode):
            raise Refused(f"tracking.wandb: got {settings.wandb!r}, expected one of {', '.join(get_args(WandbMode))}")
        if type(settings.trajectory_freq) is not int or settings.trajectory_freq < 0:
            raise Refused(
                f"tracking.trajectory_freq: got {settings.trajectory_freq!r}, expected a whole number, 0 or more"
            )
        return settings
