"""Which sweep a command belongs to: a fingerprint of its resolved base config, without what is swept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hydra.core.utils import setup_globals
from omegaconf import MISSING, DictConfig, OmegaConf

from poimen_exp.sweep.space import Space, bare_key

Flat = dict[str, Any]
"""Dotted key to plain value."""

_NOT_IDENTITY = ("hydra", "sweep")
_MISSING = "<missing>"


@dataclass(frozen=True)
class Identity:
    """A sweep's name for itself: two commands with one fingerprint are one sweep."""

    base: Flat
    swept: tuple[str, ...]
    intervals: dict[str, str]
    """Bounds of the sampled keys: other bounds are another search."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over base config, swept keys and bounds; listed values and trial counts may grow."""
        text = json.dumps([self.base, self.swept, self.intervals], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def identify(base: DictConfig, space: Space) -> Identity:
    """The identity of a sweep.

    Args:
        base: composed config with the fixed overrides and without the swept ones.
        space: what is swept.
    """
    flat = resolved_leaves(base, space.keys)
    intervals = {bare_key(a.key): f"{a.low!r}..{a.high!r}{' log' if a.log else ''}" for a in space.intervals}
    return Identity(flat, space.keys, intervals)


def resolved_leaves(base: DictConfig, swept: tuple[str, ...]) -> Flat:
    """Resolved leaves of a config, without Hydra's node, the ``sweep`` node and the swept keys.

    Clock and run folder (``${now:...}``, ``${hydra:...}``) stay as text, or no command would ever be the same again.
    """
    raw = OmegaConf.to_container(base, resolve=False)
    assert isinstance(raw, dict)
    # What interpolates a mandatory key needs some value of it.
    named = _fill_missing({key: value for key, value in raw.items() if key not in _NOT_IDENTITY})
    with _clock_as_text():
        plain = OmegaConf.to_container(OmegaConf.create(named), resolve=True)
    assert isinstance(plain, dict)
    flat = json.loads(json.dumps(dict(_leaves(plain, "")), default=str, sort_keys=True))
    return {key: value for key, value in flat.items() if not any(key == s or key.startswith(f"{s}.") for s in swept)}


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """One line for each key whose value differs: ``key: OLD there, NEW in this command``."""
    absent = "nothing"
    lines = []
    for key in sorted(theirs.keys() | ours.keys()):
        old, new = theirs.get(key, absent), ours.get(key, absent)
        if old != new or (key in theirs) != (key in ours):
            lines.append(f"{key}: {_show(old)} there, {_show(new)} in this command")
    return lines


def identity_differences(theirs: Identity, ours: Identity) -> list[str]:
    """What sets two sweeps apart, the swept keys and bounds first."""
    lines = []
    if theirs.swept != ours.swept:
        lines.append(f"swept keys: {_keys(theirs)} there, {_keys(ours)} in this command")
    lines += [f"bounds of {line}" for line in differences(theirs.intervals, ours.intervals)]
    return lines + differences(theirs.base, ours.base)


def _keys(identity: Identity) -> str:
    return ", ".join(identity.swept) or "none"


def _show(value: Any) -> str:
    return value if value == "nothing" else json.dumps(value)


def _fill_missing(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _fill_missing(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_fill_missing(value) for value in node]
    return _MISSING if isinstance(node, str) and node == MISSING else node


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


@contextmanager
def _clock_as_text() -> Iterator[None]:
    for name in ("now", "hydra"):
        OmegaConf.register_new_resolver(name, _echo(name), replace=True, use_cache=False)
    try:
        yield
    finally:
        setup_globals()


def _echo(name: str) -> Any:
    return lambda *args: f"<{name}:{':'.join(map(str, args))}>"
