"""``poimen plan``: what solo would do with each field of a configuration, what a run would cost, what it refuses."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poimen_exp.config.compose import compose_config
from poimen_exp.config.tree import check_verl_version, lookup, resolved, verl_tree
from poimen_exp.errors import Refused
from poimen_exp.solo.plan import FieldPlan, compile_settings, default_of, plan_json
from poimen_exp.solo.plan_files import Compiled, compile_source, missing_lines, write_plan_files
from poimen_exp.solo.plan_source import Source
from poimen_exp.solo.rules_table import OWN
from poimen_exp.wording import counted


@dataclass(frozen=True)
class PlanRequest:
    """What is asked of a plan beside the table.

    Attributes:
        out: file for the local configuration; None writes nothing.
        dry_run: load everything a run reads, gate check included.
        all_leaves: a row for every leaf; else for those that ``_standing_out`` names.
    """

    as_json: bool = False
    all_leaves: bool = False
    out: Path | None = None
    force: bool = False
    dry_run: bool = False


def report_plan(source: Source, request: PlanRequest) -> None:
    """Prints the plan of a configuration; writes it where ``request.out`` says.

    Raises:
        Refused: after the plan was printed, if solo cannot run the configuration as it is: every refused field, or
            every value that is left to fill in.
    """
    check_verl_version()
    compiled = compile_source(source)
    if not request.as_json:
        _print(compiled, request.all_leaves)
    written = [] if request.out is None else [*map(str, write_plan_files(compiled, request.out, request.force))]
    cost, told = _cost(compiled, request)
    if request.as_json:
        print(json.dumps({**_json(compiled), "written": written, "estimate": cost}, indent=2))
    else:
        for line in [*(f"wrote {path}" for path in written), *told]:
            print(line)
    _refuse(compiled)


def _json(compiled: Compiled) -> dict[str, Any]:
    return {**plan_json(compiled.plan), "refused": list(compiled.refusals), "missing": dict(compiled.missing)}


def _refuse(compiled: Compiled) -> None:
    name = compiled.source.name
    if compiled.refusals:
        head = f"{name}: {counted(len(compiled.refusals), 'field')} that a solo run refuses:\n"
        raise Refused(head + "\n".join(compiled.refusals))
    if compiled.missing:
        head = f"{name}: {counted(len(compiled.missing), 'value')} to fill in:\n"
        raise Refused(head + "\n".join(missing_lines(compiled)))


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


def _print(compiled: Compiled, all_leaves: bool) -> None:
    """Two lines a field, the reason on the second: no column is padded to the longest."""
    shown = compiled.plan if all_leaves else _standing_out(compiled)
    print("field = value: disposition -> target\n    reason")
    for entry in sorted(shown, key=lambda entry: entry.refusal is None):
        target = f" -> {entry.target}" if entry.target else ""
        print(f"{entry.field} = {_short(entry.value)}: {_verdict(entry, compiled)}{target}")
        print(f"    {entry.refusal or entry.lowering or entry.reason}")
    print(*_footer(compiled, len(shown)), sep="\n")


def _standing_out(compiled: Compiled) -> list[FieldPlan]:
    """Refused, left to fill in, lowered, or not as by default (verl's; for our own keys that of the root config)."""
    cfg, own = compiled.source.cfg, resolved(compose_config())
    verls = verl_tree().leaves

    def changed(entry: FieldPlan) -> bool:
        if entry.field in OWN:
            return str(lookup(own, entry.field)) != str(entry.value)
        return entry.field not in verls or bool(default_of(cfg, entry.field) != entry.value)

    return [e for e in compiled.plan if e.refusal or e.disposition == "locally_lowered" or changed(e)]


def _verdict(entry: FieldPlan, compiled: Compiled) -> str:
    if entry.refusal in compiled.refusals:
        return "REFUSED"
    # Refused now, but not once files and folders are named: FILL IN too.
    return "FILL IN" if entry.refusal or entry.field in compiled.missing else entry.disposition


def _footer(compiled: Compiled, shown: int) -> list[str]:
    counts = Counter(_verdict(entry, compiled) for entry in compiled.plan)
    leaves = len(compiled.plan)
    lines = [f"{leaves:,} leaves: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())]
    if shown < leaves:
        kinds = "refused, to fill in, changed from their default, or lowered"
        lines.append(f"shown: the {shown} that are {kinds}; --all: every leaf")
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
