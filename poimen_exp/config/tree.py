"""verl's configuration tree as this program knows it: every leaf of ``ppo_trainer`` with its default."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from poimen_exp.errors import Refused

TREE_FILE = Path(__file__).with_name("verl_tree.json")
"""Written by ``scripts/make_verl_tree.py``."""

MISSING = "???"


@dataclass(frozen=True)
class VerlTree:
    """The tree of one verl release.

    Attributes:
        leaves: dotted path -> default as the YAML has it (interpolations are kept as text).
        extra: dotted paths that the YAML leaves out but verl's own dataclasses accept (added with ``+key=value``).
        open: dotted paths below which any key may stand.
    """

    version: str
    leaves: Mapping[str, Any]
    extra: frozenset[str]
    open: frozenset[str]


@lru_cache
def verl_tree() -> VerlTree:
    """The committed tree."""
    data = json.loads(TREE_FILE.read_text(encoding="utf-8"))
    return VerlTree(data["verl"], data["leaves"], frozenset(data["extra"]), frozenset(data["open"]))


def walk(cfg: DictConfig, stop: frozenset[str] = frozenset(), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, raw node) of every leaf of ``cfg``, in file order.

    A leaf is anything but a non-empty mapping; interpolations are not followed. Nothing below a path in ``stop`` is
    entered: the mapping itself is the leaf.
    """
    for key in cfg:
        path = f"{prefix}.{key!s}" if prefix else str(key)
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and _is_branch(node) and path not in stop:
            yield from walk(node, stop, path)
        else:
            yield path, node


def _is_branch(node: DictConfig) -> bool:
    return not (node._is_none() or node._is_interpolation() or node._is_missing()) and len(node) > 0


def raw_value(node: Any) -> Any:
    """A node as plain data, interpolations as their text."""
    if isinstance(node, DictConfig | ListConfig):
        if node._is_interpolation() or node._is_missing():
            return node._value()
        return OmegaConf.to_container(node)
    return node._value()


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The whole configuration as plain data; what is not set stays ``???``.

    Raises:
        Refused: an interpolation that does not resolve.
    """
    try:
        tree = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise Refused(str(error)) from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def lookup(tree: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of plain data."""
    value: Any = tree
    for name in path.split("."):
        value = value[name]
    return value


def check_verl_version(installed: Mapping[str, Any] | None = None) -> None:
    """Refuses a verl whose configuration is not the one that the rules were written for.

    Args:
        installed: leaves of the installed verl, for a message that names what differs; composed if left out.
    """
    tree = verl_tree()
    version = importlib.metadata.version("verl")
    if version == tree.version:
        return
    differing = differences(tree.leaves, compose_leaves() if installed is None else installed)
    listed = "".join(f"\n  {line}" for line in differing) or " none of its keys, but perhaps what they mean"
    raise Refused(f"verl: got version {version}, expected {tree.version}: uv sync. Between the two differ:{listed}")


def differences(known: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """One line for each key that was added, removed or has another default."""
    lines = []
    for path in sorted(known.keys() | found.keys()):
        if path not in known:
            lines.append(f"+ {path}: {found[path]!r}")
        elif path not in found:
            lines.append(f"- {path}: {known[path]!r}")
        elif known[path] != found[path]:
            lines.append(f"! {path}: {known[path]!r} -> {found[path]!r}")
    return lines


def compose_leaves() -> dict[str, Any]:
    """Leaves and defaults of the installed verl's ``ppo_trainer``."""
    from hydra import compose, initialize_config_dir

    from poimen_exp.config.paths import verl_config_dir

    with initialize_config_dir(str(verl_config_dir()), version_base="1.3"):
        return {path: raw_value(node) for path, node in walk(compose("ppo_trainer"))}
