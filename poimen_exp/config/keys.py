"""Refuses keys that neither verl nor we know.

verl's YAML is not structured: Hydra adds a misspelt key in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import lru_cache
from itertools import takewhile
from typing import Any

from omegaconf import DictConfig

from poimen_exp.config.schema import own_keys
from poimen_exp.config.tree import raw_value, verl_tree, walk
from poimen_exp.errors import Refused


@lru_cache
def known_leaves() -> frozenset[str]:
    """verl's leaves (also those that only its dataclasses have) and ours."""
    tree = verl_tree()
    return frozenset(tree.leaves) | tree.extra | tree.open | own_keys()


@lru_cache
def known_branches() -> frozenset[str]:
    """Every mapping above a known leaf."""
    return frozenset(parent for leaf in known_leaves() for parent in _parents(leaf))


def is_known(path: str) -> bool:
    """Whether a dotted path is a leaf, a mapping, or lies below an open mapping."""
    return path in known_leaves() or path in known_branches() or _is_open(path)


def suggestion(path: str) -> str:
    """``; did you mean ...?``, or nothing where no key is near."""
    near = _near(path)
    return f"; did you mean {near}?" if near else ""


def unknown_key(path: str, where: str = "") -> str:
    """One line about one unknown key."""
    return f"{path}: no such key{where}{suggestion(path)}"


def check_keys(cfg: DictConfig) -> None:
    """Refuses a composed configuration that has a key too many or one too few; ``hydra.*`` has Hydra's own schema.

    Raises:
        Refused: all unknown keys, with a suggestion each; a known key that was deleted.
    """
    tree = verl_tree()
    engine = cfg.get("model_engine")
    if engine != tree.leaves["model_engine"]:
        raise Refused(f"model_engine: got {engine}, expected dp: the key tree is that of verl's FSDP engines")
    lines = [unknown_key(path) for path in unknown_paths(cfg)]
    lines += [f"{path}: was deleted; expected a value" for path in _deleted(cfg)]
    if lines:
        raise Refused("\n".join(lines))


def unknown_paths(cfg: DictConfig) -> list[str]:
    """Paths of ``cfg`` that are not known; below an unknown mapping only the mapping is named."""
    return list(_unknown(cfg))


def _unknown(cfg: DictConfig) -> Iterator[str]:
    named: set[str] = set()
    for path, node in walk(cfg, stop=_stops()):
        if path in known_leaves() or _is_open(path) or path.startswith("hydra."):
            continue
        if path in known_branches() and raw_value(node) in ({}, None):
            continue  # an emptied mapping: its missing leaves are named instead
        top = next((parent for parent in _parents(path) if not is_known(parent)), path)
        if top not in named:
            named.add(top)
            yield top


def _deleted(cfg: DictConfig) -> list[str]:
    present = {path for path, _ in walk(cfg, stop=_stops())}
    present |= {parent for path in present for parent in _parents(path)}
    wanted = frozenset(verl_tree().leaves) | own_keys()
    return [path for path in sorted(wanted - present) if not _is_open(path)]


@lru_cache
def _stops() -> frozenset[str]:
    """Leaves whose value may be a mapping."""
    tree = verl_tree()
    followed = (path for path, value in tree.leaves.items() if isinstance(value, str) and "${" in value)
    return (tree.open & tree.leaves.keys()) | tree.extra | frozenset(followed)


def _is_open(path: str) -> bool:
    return any(parent in verl_tree().open for parent in _parents(path))


def _parents(path: str) -> list[str]:
    """Paths of the mappings above ``path``, the outermost first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _near(path: str) -> str | None:
    """The known key that ``path`` most likely means: a sibling, the same name elsewhere, or one spelt alike."""
    known = known_leaves() | known_branches()
    parent, _, name = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
    if near:
        return siblings[near[0]]
    same = [key for key in known if key.rpartition(".")[2] == name]
    if same:
        return max(same, key=lambda key: (_shared(key, path), _rank(key), key in own_keys(), -len(key)))
    whole = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    return whole[0] if whole else None


def _shared(one: str, other: str) -> int:
    """How many leading names two paths have in common."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _rank(path: str) -> bool:
    """Whether a key belongs to a role that a gates run has."""
    return path.startswith(("actor_rollout_ref.actor.", "actor_rollout_ref.model.", "data.", "trainer.", "algorithm."))


def flat(cfg: Any) -> dict[str, Any]:
    """Dotted leaf -> raw value of a composed configuration."""
    return {path: raw_value(node) for path, node in walk(cfg, stop=_stops())}
