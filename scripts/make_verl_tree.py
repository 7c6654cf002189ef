"""Writes poimen_exp/config/verl_tree.json from the installed verl: run after a change of the verl pin.

usage: python scripts/make_verl_tree.py
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from dataclasses import fields, is_dataclass
from typing import Any

from poimen_exp.config.tree import TREE_FILE, compose_leaves

OPEN_NULLS = (
    "actor_rollout_ref.actor.optim.override_optimizer_config",
    "critic.optim.override_optimizer_config",
    "reward_model.rollout.engine_kwargs",
)
"""Null in the YAML, any mapping by what verl does with it."""

OPEN_BRANCHES = (
    "actor_rollout_ref.rollout.engine_kwargs",
    "distillation.teacher_models",
    "ray_kwargs.ray_init",
)
"""Mappings that verl hands on whole, with keys of their own in the YAML."""

CLOSED_EMPTY = ("trainer.v1.sync",)
"""Empty in the YAML, and verl reads nothing from them."""


def dataclass_only(leaves: dict[str, Any]) -> list[str]:
    """Paths that a node's ``_target_`` dataclass accepts and the YAML leaves out."""
    branches = {path.rsplit(".", depth)[0] for path in leaves for depth in range(1, path.count(".") + 1)}
    found = []
    for path, target in leaves.items():
        if not path.endswith("._target_"):
            continue
        node = path.removesuffix("._target_")
        module, _, name = target.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        if not is_dataclass(kind):
            continue
        for field in fields(kind):
            key = f"{node}.{field.name}"
            if field.init and not field.name.startswith("_") and key not in leaves and key not in branches:
                found.append(key)
    return sorted(found)


def tree() -> dict[str, Any]:
    """What the file holds."""
    leaves = compose_leaves()
    empty = {path for path, value in leaves.items() if value == {}} - set(CLOSED_EMPTY)
    return {
        "verl": importlib.metadata.version("verl"),
        "open": sorted(empty | set(OPEN_NULLS) | set(OPEN_BRANCHES)),
        "extra": dataclass_only(leaves),
        "leaves": leaves,
    }


if __name__ == "__main__":
    TREE_FILE.write_text(json.dumps(tree(), indent=1) + "\n", encoding="utf-8")
    print(TREE_FILE)
