"""``poimen plan``: what solo would do with each field of a configuration, what a run would cost, what it refuses."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from poimen_exp.config.tree import check_verl_version
from poimen_exp.errors import Refused
from poimen_exp.solo.plan import FieldPlan, compile_settings, plan_json
from poimen_exp.solo.plan_files import Compiled, compile_source, missing_lines, write_plan_files
from poimen_exp.solo.plan_source import Source


@dataclass(frozen=True)
class PlanRequest:
    """What is asked of a plan beside the table.

    Attributes:
        out: file for the local configuration; None writes nothing.
        dry_run: load everything a run reads, gate check included.
    """

    as_json: bool = False
    out: Path | None = None
    force: bool = False
    dry_run: bool = False


def report_plan(source: Source, request: PlanRequest, console: Console | None = None) -> None:
    """Prints the plan of a configuration; writes it where ``request.out`` says.

    Raises:
        Refused: after the plan was printed, if solo cannot run the configuration as it is: every refused field, or
            every value that is left to fill in.
    """
    check_verl_version()
    compiled = compile_source(source)
    console = console or Console(width=None if sys.stdout.isatty() else 200)
    if not request.as_json:
        _print(compiled.plan, console)
    written = [] if request.out is None else [*map(str, write_plan_files(compiled, request.out, request.force))]
    cost, told = _cost(compiled, request)
    if request.as_json:
        print(json.dumps({**_json(compiled), "written": written, "estimate": cost}, indent=2))
    else:
        for line in [*(f"wrote {path}" for path in written), *told]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    _refuse(compiled)


def _json(compiled: Compiled) -> dict[str, Any]:
    return {**plan_json(compiled.plan), "refused": list(compiled.refusals), "missing": dict(compiled.missing)}


def _refuse(compiled: Compiled) -> None:
    name = compiled.source.name
    if compiled.refusals:
        count = len(compiled.refusals)
        raise Refused(f"{name}: {count} fields stand against a solo run:\n" + "\n".join(compiled.refusals))
    if compiled.missing:
        count = len(compiled.missing)
        raise Refused(f"{name}: {count} values are to be filled in:\n" + "\n".join(missing_lines(compiled)))


def _cost(compiled: Compiled, request: PlanRequest) -> tuple[dict[str, Any] | None, list[str]]:
    """The estimate of a configuration that runs. A dry run refuses what cannot be read; a plan says so."""
    if compiled.refusals or compiled.missing:
        return None, []
    try:
        return _dry(compiled, gate_check=request.dry_run)
    except Refused as error:
        if request.dry_run:
            raise
        return None, [f"estimate: not made: {str(error).splitlines()[0]}"]


def _dry(compiled: Compiled, gate_check: bool) -> tuple[dict[str, Any], list[str]]:
    """Loads what a run reads, and takes no step. With ``gate_check`` all that a run is refused for."""
    from poimen_exp.solo import dry

    if gate_check:
        settings, setup = dry.checked_setup(compiled.local)
    else:
        settings, _ = compile_settings(compiled.local)
        setup = dry.loaded_setup(settings)
    cost = dry.cost(settings, setup)
    told = list(cost.told)
    if gate_check:
        told.append("dry run: model, tokenizer, tasks, rewards and gate check are in order; no step was taken")
    return cost.estimate, told


def _print(plan: Sequence[FieldPlan], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("field", "value", "disposition", "target", "reason"):
        table.add_column(column, overflow="fold")
    for entry in sorted(plan, key=lambda entry: entry.refusal is None):
        disposition = "REFUSED" if entry.refusal else entry.disposition
        reason = entry.refusal or entry.lowering or entry.reason
        table.add_row(entry.field, _short(entry.value), disposition, entry.target or "", reason)
    console.print(table)
    counts = Counter(entry.disposition for entry in plan)
    console.print(", ".join(f"{name} {count}" for name, count in counts.most_common()))


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
