"""``poimen dashboard``: the four panels as a W&B workspace, built without a network."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from poimen_exp.errors import Refused
from poimen_exp.sweep.panels import PANELS
from poimen_exp.tracking.files import write_atomic
from poimen_exp.tracking.wandb_online import require_online

X_AXIS = "step"
"""The metric that ``define_metric`` makes the x axis of ``train/*`` and ``val/*``."""
_MOST_RUNS = 100
"""W&B draws ten groups unless told otherwise."""


@dataclass(frozen=True)
class Place:
    """Where the runs are in W&B. ``entity`` is empty for the key's own; ``group`` None for all runs of the project."""

    entity: str
    project: str
    group: str | None


def place_of(sweep: Path | None, entity: str | None, project: str | None) -> Place:
    """The place of a sweep's runs: what is given, else what the sweep's configuration says."""
    if sweep is None:
        return Place(entity or "", project or "poimen", None)
    folder = sweep.absolute()
    config = next(iter(sorted(folder.glob("*/.hydra/config.yaml"))), None)
    if config is None:
        raise Refused(f"{sweep}: no run lies here; expected a sweep's folder, multirun/<experiment>/<time>")
    tracking = OmegaConf.select(OmegaConf.load(config), "tracking")
    group = tracking.group or f"{folder.parent.name}/{folder.name}"
    return Place(entity or tracking.entity or "", project or tracking.project, group)


def build_workspace(place: Place) -> Any:
    """The workspace: four line plots over ``step``; runs of one alpha are drawn as mean and spread."""
    reports, workspaces = libraries()
    plots = [
        reports.LinePlot(
            title=panel.title,
            x=X_AXIS,
            y=[panel.metric],
            groupby="config.alpha",
            groupby_aggfunc="mean",
            groupby_rangefunc="stddev",
            layout=reports.Layout(x=12 * (position % 2), y=8 * (position // 2), w=12, h=8),
        )
        for position, panel in enumerate(PANELS)
    ]
    return workspaces.Workspace(
        entity=place.entity,
        project=place.project,
        name=f"Alpha ablation {place.group or ''}".strip(),
        sections=[workspaces.Section(name="Alpha ablation", panels=plots, is_open=True)],
        settings=workspaces.WorkspaceSettings(x_axis=X_AXIS, max_runs=_MOST_RUNS),
        runset_settings=workspaces.RunsetSettings(
            groupby=[workspaces.Config("alpha")],
            filters="" if place.group is None else workspaces.And(workspaces.Metric("group") == place.group),
        ),
    )


def libraries() -> tuple[Any, Any]:
    """``wandb_workspaces.reports.v2`` and ``.workspaces``, imported without their deprecation warnings (pydantic)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from wandb_workspaces import workspaces
        from wandb_workspaces.reports import v2
    return v2, workspaces


def as_json(workspace: Any) -> str:
    """The workspace as W&B would get it, the same text each time."""
    view = json.loads(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True))
    panels = view["spec"]["section"]["panelBankConfig"]["sections"][0]["panels"]
    for number, panel in enumerate(panels):
        panel["__id__"] = f"panel-{number}"  # random in the library
    return json.dumps(view, indent=2) + "\n"


def write_dashboard(place: Place, out: Path, *, save: bool | None) -> str:
    """Writes the workspace to a file, and to W&B where that is wanted; returns a sentence about what was done.

    Args:
        save: True: must be saved. None: saved if W&B accepts this machine's key. False: file only.

    Raises:
        Refused: ``save`` is True and W&B cannot be reached with this machine's key.
    """
    workspace = build_workspace(place)
    write_atomic(out, as_json(workspace).encode())
    if save is False:
        return f"wrote {out}"
    try:
        require_online()
    except Refused as refusal:
        if save:
            raise
        return f"wrote {out}; not saved to W&B: {refusal}"
    if not place.entity:
        import wandb

        workspace.entity = wandb.Api().default_entity
    workspace.save()
    return f"wrote {out}; saved as {workspace.url}"
