"""Two alphas, two seeds, fifty steps each, by the program's command line; four processes of one thread side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from poimen_exp.tracking.metrics_log import MetricLine, by_step, read_metrics

STEPS = 50
SETTINGS = (
    "+experiment=quickstart",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.test_freq={STEPS}",
    "trainer.save_freq=0",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "stop=never",
    "tracking=none",
)


@dataclass(frozen=True)
class AlphaRun:
    """What a run measured, by step, and the LoRA B matrices it left (they start at 0)."""

    lines: Mapping[int, MetricLine]
    lora_b: tuple[torch.Tensor, ...]

    def train(self, name: str, first: int, last: int) -> float:
        """Mean of a train metric over steps ``first`` to ``last``, each step weighed by its denominator."""
        full = f"train/{name}"
        counted = [(line.metrics[full], line.counts[full]) for line in self._between(first, last)]
        return sum(value * count for value, count in counted) / sum(count for _, count in counted)

    def val(self, name: str, step: int) -> float:
        """A validation metric."""
        return self.lines[step].metrics[f"val/{name}"]

    def total(self, name: str) -> float:
        """Sum of a metric over all training steps."""
        return sum(line.metrics[name] for line in self._between(1, STEPS))

    def _between(self, first: int, last: int) -> list[MetricLine]:
        return [self.lines[step] for step in range(first, last + 1)]


def run_all(alphas: tuple[float, ...], seeds: tuple[int, ...], folder: Path) -> dict[tuple[float, int], AlphaRun]:
    """Every (alpha, seed); fails with the output of a run that did not end with 0."""
    folders = {(alpha, seed): folder / f"{alpha}-{seed}" for seed in seeds for alpha in alphas}
    jobs = [
        ((*SETTINGS, f"alpha={alpha}", f"seed={seed}", f"hydra.run.dir={path}"), f"{path}.log")
        for (alpha, seed), path in folders.items()
    ]
    command = [sys.executable, str(Path(__file__).with_name("alpha_side.py")), json.dumps(jobs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for job, path in folders.items():
        said = path.with_suffix(f"{path.suffix}.log")
        assert (path / "result.json").exists(), f"{job}: {said.read_text()[-4000:] if said.exists() else done.stderr}"
    assert done.returncode == 0, done.stderr
    return {job: _read(path) for job, path in folders.items()}


def _read(folder: Path) -> AlphaRun:
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    lora_b = tuple(value for name, value in weights.items() if ".lora_B." in name)
    return AlphaRun(by_step(read_metrics(folder / "metrics.jsonl").lines), lora_b)
