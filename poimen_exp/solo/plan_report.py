"""``poimen plan``: what solo would do with each field of a configuration file."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from yaml import YAMLError

from poimen_exp.config.compose import compose_config, override
from poimen_exp.config.keys import check_keys
from poimen_exp.config.schema import own_keys
from poimen_exp.config.tree import check_verl_version, verl_tree
from poimen_exp.errors import Refused
from poimen_exp.solo.plan import FieldPlan, across, plan_fields, plan_json


def report_plan(file: Path, overrides: Sequence[str], as_json: bool, console: Console | None = None) -> None:
    """Prints the plan of a configuration file.

    Raises:
        Refused: after the plan was printed, if solo cannot run the configuration; with every refused field.
    """
    check_verl_version()
    cfg = load_config(file, overrides)
    values, plan = plan_fields(cfg, placement="report")
    refusals = [entry.refusal for entry in plan if entry.refusal] or across(values)
    if as_json:
        print(json.dumps({**plan_json(plan), "refused": refusals}, indent=2))
    else:
        _print(plan, console or Console(width=None if sys.stdout.isatty() else 200))
    if refusals:
        raise Refused(f"{file}: {len(refusals)} fields stand against a solo run:\n" + "\n".join(refusals))


def load_config(file: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """A resolved verl configuration, or one of ours (``resolved.yaml``), with overrides.

    What the file leaves out has verl's default, and our own keys have those of the root config.

    Raises:
        Refused: not a YAML mapping, an unknown key.
    """
    try:
        loaded = OmegaConf.load(file)
    except FileNotFoundError:
        raise Refused(f"{file}: not found; expected a YAML file with a verl configuration") from None
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise Refused(f"{file}: not YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise Refused(f"{file}: got a list or a text, expected a mapping")
    cfg = OmegaConf.merge(_base(), loaded)
    assert isinstance(cfg, DictConfig)
    cfg = override(cfg, overrides)
    check_keys(cfg)
    return cfg


def _base() -> DictConfig:
    """verl's defaults with our own keys beside them."""
    base = OmegaConf.create()
    for path, default in verl_tree().leaves.items():
        OmegaConf.update(base, path, default, force_add=True)
    ours = compose_config()
    for name in sorted({path.split(".")[0] for path in own_keys()}):
        base[name] = ours[name]
    return base


def _print(plan: Sequence[FieldPlan], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("field", "value", "disposition", "target", "reason"):
        table.add_column(column, overflow="fold")
    for entry in sorted(plan, key=lambda entry: entry.refusal is None):
        disposition = "REFUSED" if entry.refusal else entry.disposition
        table.add_row(entry.field, _short(entry.value), disposition, entry.target or "", entry.reason)
    console.print(table)
    counts = Counter(entry.disposition for entry in plan)
    console.print(", ".join(f"{name} {count}" for name, count in counts.most_common()))


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
