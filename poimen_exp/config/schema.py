"""Our own keys beside verl's: their names, types and ranges. What is not here is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from poimen_exp.errors import Refused
from poimen_exp.tracking.settings import TrackingSettings

MISSING_CORPUS = (
    "corpus.path: not set; expected the folder of a poimen.corpus/1 corpus: corpus.path=DIR, "
    "or +experiment=quickstart, which ships one"
)

Share = Annotated[float, Meta(ge=0, le=1)]
OpenShare = Annotated[float, Meta(gt=0, lt=1)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Duration = Annotated[float, Meta(gt=0)]
Weight = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class CorpusKeys:
    path: str
    chunk_tokens: Positive
    max_chunks: Positive
    min_kappa: Share
    allow_unmeasured: bool
    on_too_long: Literal["refuse", "drop"]
    split_seed: int
    val_fraction: OpenShare
    test_fraction: OpenShare
    max_val_tasks: Positive | None


@dataclass(frozen=True)
class WarmStartKeys:
    steps: Count
    lr: Weight
    batch: Positive


@dataclass(frozen=True)
class GateKeys:
    layout: Literal["chunk_first", "memory_first"]
    wording: Literal["full", "terse"]
    memory_tokens: Positive
    on_unparsed: Literal["zero_trajectory", "zero_format"]
    matcher: Literal["exact", "contains", "f1"]
    warm_start: WarmStartKeys


@dataclass(frozen=True)
class AdvantageKeys:
    turn_baseline: Literal["group_step", "batch_step"]


@dataclass(frozen=True)
class RolloutKeys:
    max_failed: Share
    turn_timeout_s: Duration
    stall_timeout_s: Duration


@dataclass(frozen=True)
class RewardKeys:
    provider: Literal["exact_answer", "target_length", "verl"] | None


@dataclass(frozen=True)
class ReferenceKeys:
    adapter: str | None


@dataclass(frozen=True)
class StopKeys:
    patience: Positive | None
    min_delta: Weight
    on_collapse: Literal["warn", "stop"]


@dataclass(frozen=True)
class AdapterKeys:
    weights: Literal["best", "last"]
    registry: str | None
    name: str


@dataclass(frozen=True)
class SweepKeys:
    resume: str | None
    storage: str | None


@dataclass(frozen=True)
class PoimenKeys:
    """Every key of ours, as it stands at the root of the composed configuration."""

    alpha: Share
    seed: Count
    backend: Literal["solo", "verl"]
    device: Literal["auto", "cpu", "cuda"]
    corpus: CorpusKeys
    gates: GateKeys
    advantage: AdvantageKeys
    rollout: RolloutKeys
    rewards: RewardKeys
    reference: ReferenceKeys
    stop: StopKeys
    tracking: TrackingSettings
    adapter: AdapterKeys
    sweep: SweepKeys


@lru_cache
def own_keys(kind: type = PoimenKeys, prefix: str = "") -> frozenset[str]:
    """Dotted paths of all our leaves."""
    found: set[str] = set()
    for name, hint in get_type_hints(kind).items():
        found |= own_keys(hint, f"{prefix}{name}.") if is_dataclass(hint) else {f"{prefix}{name}"}  # type: ignore[arg-type]
    return frozenset(found)


def typed_keys(values: Mapping[str, Any]) -> PoimenKeys:
    """Our part of a resolved configuration, typed.

    Raises:
        Refused: a value of another type or out of its range; the message names the key, the value and what it may be.
    """
    try:
        keys = msgspec.convert({field.name: values[field.name] for field in fields(PoimenKeys)}, PoimenKeys)
    except msgspec.ValidationError as error:
        raise Refused(_explain(str(error), values)) from error
    _refuse_non_finite(values)
    return keys


def _explain(message: str, values: Mapping[str, Any]) -> str:
    match = re.search(r"at `\$\.([\w.]+)", message)
    if match is None:
        return message
    kind: Any = PoimenKeys
    got: Any = values
    for name in match[1].split("."):
        kind, got = get_type_hints(kind, include_extras=True)[name], got[name]
    return f"{match[1]}: got {got!r}, expected {_describe(kind)}"


_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


def _describe(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Annotated:
        base, meta = get_args(kind)
        bounds = [f"{word} {getattr(meta, name)}" for name, word in _BOUNDS if getattr(meta, name) is not None]
        return f"{_describe(base)} {' and '.join(bounds)}"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_args(kind) and type(None) in get_args(kind):
        return " or ".join("null" if part is type(None) else _describe(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of texts"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(kind, "a mapping")


def _refuse_non_finite(values: Mapping[str, Any]) -> None:
    for path in sorted(own_keys()):
        got: Any = values
        for name in path.split("."):
            got = got[name]
        if isinstance(got, float) and not math.isfinite(got):
            raise Refused(f"{path}: got {got}, expected a finite number")
