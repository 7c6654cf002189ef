"""Configurations of verl's as others write them, and the command line in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from poimen_exp import cli
from poimen_exp.config.paths import asset

MODEL, CORPUS = asset("quickstart/model"), asset("quickstart/corpus")


def poimen(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of ``poimen ...``."""
    monkeypatch.setattr(sys, "argv", ["poimen", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def verl_file(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """A sparse verl configuration of the gates for four nodes, with ``changes`` by dotted key (None removes a key)."""
    leaves: dict[str, Any] = {
        "algorithm.adv_estimator": "poimen_gates",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 256,
        "data.max_response_length": 64,
        "actor_rollout_ref.model.path": MODEL,
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.ref.fsdp_config.dtype": "float32",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.max_model_len": 4096,
        "trainer.nnodes": 4,
        "trainer.total_training_steps": 3,
        "corpus.path": CORPUS,
        "corpus.chunk_tokens": 64,
        "gates.wording": "terse",
        "gates.memory_tokens": 32,
        **(changes or {}),
    }
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        if value is None:
            continue
        node = tree
        *parents, name = path.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    file = folder / "source.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file
