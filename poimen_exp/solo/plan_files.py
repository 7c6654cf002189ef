"""What ``poimen plan --out`` leaves: a configuration that runs (or a template that does not), and its import report."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from poimen_exp.config.keys import flat
from poimen_exp.config.tree import MISSING, lookup, resolved, verl_tree
from poimen_exp.errors import Refused
from poimen_exp.solo.plan import MISSING_REWARD, FieldPlan, across, default_of, plan_fields
from poimen_exp.solo.plan_source import FILL_IN, Source
from poimen_exp.tracking.files import write_atomic
from poimen_exp.wording import counted

SCHEMA = "poimen.import/1"

CHOICES: dict[str, str] = {
    "corpus.path": "folder of a poimen.corpus/1 corpus, which has the tasks and what they are rewarded for",
    MISSING_REWARD: "source of rewards: exact_answer, target_length or verl; or leave it null and name a function "
    "(reward.custom_reward_function.path) or a classifier (reward.reward_model)",
    "actor_rollout_ref.model.path": "folder of a downloaded Hugging Face model",
    "actor_rollout_ref.model.lora_rank": "rank of the adapter, for example 16: one device trains no full model",
    "critic.model.path": "folder of the model that the critic starts from",
    "data.train_files": "Parquet file of training prompts",
    "data.val_files": "Parquet file of validation prompts",
    "reward.custom_reward_function.path": "Python file with the reward function",
    "reward.reward_model.model_path": "folder of the reward model",
}
"""Leaves that only the user can choose. A source that lacks one becomes a template."""


@dataclass(frozen=True)
class Compiled:
    """A source as one device takes it.

    Attributes:
        plan: of the source, one entry a leaf.
        local: the configuration that runs: cluster placement and inactive fields have values that one device takes.
        changed: leaves whose local value differs from the source's -> that value.
        missing: leaves to be filled in -> what belongs there. Empty where ``local`` runs.
        refusals: what no choice of the user repairs.
    """

    source: Source
    plan: tuple[FieldPlan, ...]
    local: DictConfig
    changed: Mapping[str, Any]
    missing: Mapping[str, str]
    refusals: tuple[str, ...]


def compile_source(source: Source) -> Compiled:
    """Plans a source: what it means here, what is left to fill in, what is refused."""
    values, plan = plan_fields(source.cfg, placement="report")
    missing = {entry.field: CHOICES[entry.field] for entry in plan if entry.refusal and entry.field in CHOICES}
    unread = "Parquet" if "data.train_files" in missing else None  # steps an epoch: known once the files are
    refusals = [
        entry.refusal
        for entry in plan
        if entry.refusal and entry.field not in missing and not (unread and unread in entry.refusal)
    ]
    for line in [] if refusals else across(values):
        if line.startswith(f"{MISSING_REWARD}: got none"):
            missing[MISSING_REWARD] = CHOICES[MISSING_REWARD]
        else:
            refusals.append(line)
    local, changed = _localised(source.cfg)
    return Compiled(source, tuple(plan), local, changed, missing, tuple(refusals))


def _localised(cfg: DictConfig) -> tuple[DictConfig, dict[str, Any]]:
    """``cfg`` resolved, with verl's default wherever only the place of the work or an unused value differs."""
    asked = {entry.field for entry in plan_fields(cfg, placement="report")[1] if entry.refusal}
    strict = [entry for entry in plan_fields(cfg, placement="refuse")[1] if entry.refusal]
    changed = {entry.field: _taken(cfg, entry.field) for entry in strict if entry.field not in asked}
    local = OmegaConf.create(resolved(cfg))
    for path, value in changed.items():
        if path in verl_tree().leaves:
            OmegaConf.update(local, path, value, force_add=True)
        else:  # of verl's dataclasses only: its default is to be left out
            parent, _, name = path.rpartition(".")
            OmegaConf.select(local, parent).pop(name)
    return local, changed


def _taken(cfg: DictConfig, path: str) -> Any:
    """A value of a leaf without a part that a run of ours takes."""
    return default_of(cfg, path) if path in verl_tree().leaves else None


def import_report(compiled: Compiled, local_name: str, local_sha256: str) -> dict[str, Any]:
    """Every leaf: the source's value, the local one, the setting it feeds, its class, the reason and the lowering."""
    source, raw = compiled.source, flat(compiled.local)
    fields = [
        {
            "field": entry.field,
            "given": entry.field in source.given,
            "source_value": entry.value,
            "local_value": None if entry.field in compiled.missing else raw.get(entry.field, entry.value),
            "target": entry.target,
            "class": entry.disposition,
            "reason": entry.reason,
            "lowering": _lowering(entry, compiled),
        }
        for entry in compiled.plan
    ]
    return {
        "schema": SCHEMA,
        "verl": verl_tree().version,
        "source": source.name,
        "source_sha256": source.sha256,
        "overrides": list(source.overrides),
        "local": local_name,
        "local_sha256": local_sha256,
        "missing": dict(compiled.missing),
        "classes": dict(Counter(entry.disposition for entry in compiled.plan).most_common()),
        "fields": fields,
    }


def _lowering(entry: FieldPlan, compiled: Compiled) -> str | None:
    if entry.field in compiled.changed:
        return f"{entry.value!r} becomes {compiled.changed[entry.field]!r}: it has no part on one device"
    return entry.lowering


def write_plan_files(compiled: Compiled, out: Path, force: bool) -> tuple[Path, Path]:
    """Writes the local configuration, or a template, and the report beside it; returns both paths.

    Each file is whole or absent, and the configuration comes last: where it is, its report is.

    Raises:
        Refused: the source cannot run whatever is filled in, or a file is there already and ``force`` is not set.
    """
    if compiled.refusals:
        raise Refused(
            f"{compiled.source.name}: {counted(len(compiled.refusals), 'field')} that a solo run refuses; nothing was "
            "written:\n" + "\n".join(compiled.refusals)
        )
    if out.suffix not in (".yaml", ".yml"):
        raise Refused(f"--out: got {out}, expected a file name that ends in .yaml")
    local = out.with_name(f"{out.stem}.template.yaml") if compiled.missing else out
    report = out.with_name(f"{out.stem}.import-report.json")
    taken = [str(path) for path in (local, report) if path.exists()]
    if taken and not force:
        raise Refused(f"{', '.join(taken)}: there already; expected a new name, or --force to replace it")
    text = _text(compiled)
    digest = hashlib.sha256(text.encode()).hexdigest()
    content = json.dumps(import_report(compiled, local.name, digest), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(report, f"{content}\n".encode())
    write_atomic(local, text.encode())
    return local, report


def _text(compiled: Compiled) -> str:
    body = compiled.local.copy()
    if not compiled.missing:
        return f"# One-device configuration of {compiled.source.name}: poimen run FILE\n" + OmegaConf.to_yaml(body)
    for path in compiled.missing:
        OmegaConf.update(body, path, MISSING, force_add=True)
    head = OmegaConf.to_yaml(OmegaConf.create({FILL_IN: dict(compiled.missing)}))
    return (
        f"# Template of {compiled.source.name}. It does not run: set the leaves that {FILL_IN} lists, here or on the\n"
        f"# command line: poimen plan FILE --out LOCAL.yaml KEY=VALUE ...\n{head}\n{OmegaConf.to_yaml(body)}"
    )


def missing_lines(compiled: Compiled) -> list[str]:
    """One line for each leaf to be filled in: what it has, what belongs there."""
    tree = resolved(compiled.source.cfg)
    return [f"{path}: got {lookup(tree, path)!r}, expected: {hint}" for path, hint in compiled.missing.items()]
