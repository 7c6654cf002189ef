"""Compiles a composed verl configuration for one device: the settings of a solo run, and what became of every leaf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from omegaconf import AnyNode, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from poimen_exp.config.keys import check_keys, flat
from poimen_exp.config.schema import MISSING_CORPUS, own_keys, typed_keys
from poimen_exp.config.tree import MISSING, lookup, resolved, verl_tree
from poimen_exp.errors import Refused
from poimen_exp.solo.rules import Disposition, Rule
from poimen_exp.solo.rules_table import OWN, RULES
from poimen_exp.solo.settings import SoloSettings

Placement = Literal["refuse", "report"]
"""What becomes of changed keys without a part on one device: refused (our runs), or reported (a foreign file)."""

_WITHOUT_PART: tuple[Disposition, ...] = ("distributed_only", "informational_only")
_OF_GATES = ("alpha", "corpus.", "gates.", "advantage.", "stop.on_collapse")
_FOLDERS = ("corpus.path", "reference.adapter")
MISSING_REWARD = "rewards.provider"
"""Key that a refusal begins with where prompts have no reward, or several."""
_UNKNOWN = Rule("*", "unsupported", "no rule says what it means on one device")


@dataclass(frozen=True)
class FieldPlan:
    """What solo does with one leaf.

    Attributes:
        target: the fields of ``SoloSettings`` it feeds, comma-separated; None for none.
        lowering: what one device does instead; None unless the disposition is ``locally_lowered``.
        refusal: why the value is refused; None where it is taken.
    """

    field: str
    value: Any
    disposition: Disposition
    target: str | None
    reason: str
    lowering: str | None = None
    refusal: str | None = None


def compile_settings(cfg: DictConfig, placement: Placement = "refuse") -> tuple[SoloSettings, list[FieldPlan]]:
    """The settings of a solo run, read through the plan's table, and the plan itself.

    Args:
        cfg: the composed configuration, without its ``hydra`` node.

    Raises:
        Refused: unknown keys; else every value that solo cannot honour, all in one message.
    """
    check_keys(cfg)
    values, plan = plan_fields(cfg, placement)
    refusals = [entry.refusal for entry in plan if entry.refusal] or across(values)
    if refusals:
        raise Refused("\n".join(refusals))
    return _build(SoloSettings, values), plan


def plan_fields(cfg: DictConfig, placement: Placement = "refuse") -> tuple[dict[str, Any], list[FieldPlan]]:
    """Values by field of ``SoloSettings``, and one entry for every leaf of ours and of verl's tree."""
    tree = resolved(cfg)
    values, plan = _plan_own(tree)
    raw = {path: value for path, value in flat(cfg).items() if path not in own_keys()}
    source = _Source(cfg, raw, {path: lookup(tree, path) for path in (*raw, "seed")}, placement)
    for path in raw:
        entry, fed = _plan_leaf(source, path)
        plan.append(entry)
        values.update(fed)
    return values, plan


def plan_json(plan: Iterable[FieldPlan]) -> dict[str, Any]:
    """The content of ``plan.json``."""
    return {"verl": verl_tree().version, "fields": [_public(entry) for entry in plan]}


def _public(entry: FieldPlan) -> dict[str, Any]:
    fields = asdict(entry)
    return {name: value for name, value in fields.items() if name != "refusal"}


@lru_cache(maxsize=4096)
def rule_of(path: str) -> Rule:
    """The first rule that matches a leaf."""
    return next((rule for rule in RULES if fnmatchcase(path, rule.pattern)), _UNKNOWN)


def _plan_own(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[FieldPlan]]:
    """Our keys; typed, so that a wrong type or range is refused by name."""
    keys = typed_keys(tree)
    gates = lookup(tree, "algorithm.adv_estimator") == "poimen_gates"
    fed: dict[str, Any] = {}
    plan = []
    for path, target in OWN.items():
        value: Any = keys
        for name in path.split("."):
            value = getattr(value, name)
        idle = not gates and path.startswith(_OF_GATES)
        disposition: Disposition = "informational_only" if idle else "exact"
        refusal = _corpus_refusal(value, gates) if path == "corpus.path" else None
        plan.append(FieldPlan(path, value, disposition, target, "of the gates" if idle else "ours", None, refusal))
        if not (idle and path.startswith("corpus.")):
            fed[target] = Path(value).expanduser() if path in _FOLDERS and value is not None else value
    return fed, plan


def _corpus_refusal(value: str, gates: bool) -> str | None:
    """Which task runs: the gates read ``corpus.path``, the other estimators ``data.train_files``."""
    if gates:
        return MISSING_CORPUS if value == MISSING else None
    if value == MISSING:
        return None
    return (
        f"corpus.path: got {value!r}, expected it left out: the corpus is read under algorithm.adv_estimator="
        "poimen_gates; other estimators train on data.train_files"
    )


@dataclass(frozen=True)
class _Source:
    """A configuration as the rules see it: leaves as written (``raw``) and as resolved (``leaves``)."""

    cfg: DictConfig
    raw: Mapping[str, Any]
    leaves: Mapping[str, Any]
    placement: Placement


def _plan_leaf(source: _Source, path: str) -> tuple[FieldPlan, dict[str, Any]]:
    rule, value = rule_of(path).within(source.leaves), source.leaves[path]
    target = ",".join(rule.targets) or None
    entry = FieldPlan(path, value, rule.disposition, target, rule.reason, rule.lowering)
    try:
        if rule.reads:
            return entry, dict.fromkeys(rule.targets, rule.convert(value, source.leaves))
        _compare(source, path, rule)
    except Refused as error:
        line = f"{path}: got {value!r}, {error}"
        kept = rule.disposition in (*_WITHOUT_PART, "unsupported")
        disposition: Disposition = rule.disposition if kept else "not_implemented"
        return replace(entry, disposition=disposition, lowering=None, refusal=line), {}
    return entry, {}


def _compare(source: _Source, path: str, rule: Rule) -> None:
    """Refuses a value that is neither verl's default nor one that the rule takes."""
    if source.placement == "report" and rule.disposition in _WITHOUT_PART:
        return
    value, known = source.leaves[path], verl_tree().leaves
    if path in known and _same(source.raw[path], known[path]):
        return  # as verl wrote it, whatever that comes to here
    choices = [source.leaves[rule.same_as]] if rule.same_as else []
    choices += rule.accepts
    named = [repr(choice) for choice in choices]
    if path in known:
        choices.append(default_of(source.cfg, path))
        if repr(choices[-1]) not in named:
            named.append(f"{choices[-1]!r} (verl's default, taken as not set)")
    if not any(_same(value, choice) for choice in choices):
        expected = " or ".join(dict.fromkeys(named)) or "it left out"
        raise Refused(f"expected {expected}: {rule.disposition} ({rule.lowering or rule.reason})")


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def default_of(cfg: DictConfig, path: str) -> Any:
    """verl's default of a leaf of its tree; an interpolation is evaluated where it stands in ``cfg``."""
    default = verl_tree().leaves[path]
    if not (isinstance(default, str) and "${" in default):
        return default
    parent_path, _, name = path.rpartition(".")
    parent = OmegaConf.select(cfg, parent_path)
    node = AnyNode(default, key=name, parent=parent)
    try:
        value = node._dereference_node()
    except OmegaConfBaseException:
        return MISSING
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value._value()


def across(values: Mapping[str, Any]) -> list[str]:
    """Refusals that depend on two values."""
    lines = [*_batches(values, "step", "actor_rollout_ref.actor"), *_batches(values, "critic", "critic")]
    fractions = [values.get(f"corpus.{name}_fraction", 0.0) for name in ("val", "test")]
    if sum(fractions) >= 1:
        lines.append(
            "corpus.val_fraction and corpus.test_fraction: expected a sum below 1: nothing is left to train on"
        )
    return lines + _rewards(values)


def _batches(values: Mapping[str, Any], role: str, key: str) -> list[str]:
    batch, mini = values["step.train_batch_size"], values.get(f"{role}.ppo_mini_batch_size")
    if mini is None or (mini <= batch and batch % mini == 0):
        return []
    return [
        f"data.train_batch_size: got {batch}, expected a multiple of {key}.ppo_mini_batch_size ({mini}): both count "
        "prompts"
    ]


def _rewards(values: Mapping[str, Any]) -> list[str]:
    """Prompts are scored by exactly one source, the gates by none of these."""
    keys = {
        "rewards.provider": values.get("reward.provider"),
        "reward.custom_reward_function.path": values.get("reward.custom_path"),
        "reward.reward_model.enable": values.get("reward.model_path"),
    }
    named = [key for key, value in keys.items() if value is not None]
    gates = values.get("algorithm.adv_estimator") == "poimen_gates"
    if gates and named:
        return [f"{named[0]}: expected it left out: the gates score themselves (gates.*)"]
    if not gates and len(named) != 1:
        got = " and ".join(named) or "none"
        advice = "; set rewards.provider=null to score with the other" if named[1:] and MISSING_REWARD in named else ""
        line = f"{MISSING_REWARD}: got {got}, expected exactly one source of rewards among {', '.join(keys)}"
        return [line + advice]
    return []


def _build(kind: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """An instance of a settings dataclass from dotted fields; what nothing feeds keeps the default of its class."""
    arguments = {}
    for name, hint in get_type_hints(kind).items():
        path = f"{prefix}{name}"
        nested = nested_settings(hint)
        if nested is None:
            if path in values:
                arguments[name] = values[path]
        elif any(field.startswith(f"{path}.") for field in values):
            arguments[name] = _build(nested, values, f"{path}.")
    return kind(**arguments)


def nested_settings(hint: Any) -> type | None:
    """The settings dataclass that a field holds, perhaps beside None; None for a plain value."""
    return next((part for part in (hint, *get_args(hint)) if isinstance(part, type) and is_dataclass(part)), None)
