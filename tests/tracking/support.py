"""A small run folder as training leaves it."""

from __future__ import annotations

import json
from pathlib import Path

from poimen_exp.tracking.files import prefix_sha256, sha256_of
from poimen_exp.tracking.provenance import CorpusFacts, collect_provenance
from poimen_exp.tracking.result import RunResult
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.settings import TrackingSettings
from poimen_exp.tracking.tracker import Tracker
from poimen_exp.tracking.trajectories import RolloutRecord, TurnRecord


def turn(chunk: int | None, advantage: float | None, tokens: int = 2) -> TurnRecord:
    return TurnRecord(
        chunk=chunk,
        label=None if chunk is None else True,
        update=None if chunk is None else True,
        end=None if chunk is None else False,
        prompt_tokens=10,
        response_ids=tuple(range(tokens)),
        log_probs=(-0.5,) * tokens,
        text="<next>end</next>\u2028",
        update_reward=None if chunk is None else 1.0,
        advantage=advantage,
    )


def rollout(step: int, sample: int, advantages: tuple[float | None, float | None]) -> RolloutRecord:
    turns = (turn(0, advantages[0]), turn(None, advantages[1], tokens=3))
    return RolloutRecord(step, step - 1, 0, sample, "t1", turns, "Paris", 0, {"total": 2.0, "format": 1.0, "exit": 0.0})


def make_run(path: Path) -> RunFolder:
    """Two steps with validations and checkpoints, finished: the reward goes 0.5 (step 0), 1.0, 1.5."""
    folder = RunFolder.create(path)
    with folder, Tracker(folder, TrackingSettings(wandb="disabled"), {}) as tracker:
        folder.write_resolved("alpha: 0.9\n")
        folder.write_plan({"verl": "0.9.1", "fields": [], "estimate": {"memory": {"peak": 5 * 2**29}}})
        folder.write_gate_check({"passed": True})
        tracker.describe(
            collect_provenance(seed=1, device="cpu: test", corpus=CorpusFacts("logs", "ab" * 32, "constructed"))
        )
        tracker.log(0, {"val/reward/total": 0.5}, {"val/reward/total": 8})
        for step in (1, 2):
            reward = {"train/reward/total": step * 0.25, "val/reward/total": 0.5 + step / 2}
            gates = {"train/gates/update_accuracy/evidence_free": step / 4, "val/gates/exit/exact": step / 8}
            costs = {"timing_s/gen": 2.0 * step, "perf/max_memory_allocated_gb": 3.0 - step, "update/skipped": 1}
            tracker.log(
                step,
                {**reward, **gates, **costs},
                {**dict.fromkeys(reward, 8), "train/reward/total": 2, **dict.fromkeys(gates, 6)},
            )
            tracker.write_trajectories(step, [rollout(step, 0, (1.0, 0.5)), rollout(step, 1, (-1.0, 0.0))])
            tracker.write_trajectories(step, [rollout(step, 0, (None, None))], "val")
            save(folder, step, tracker.metrics_bytes)
        folder.write_result(RunResult("completed", objective_value=1.5, step=2, best_step=2))
    return folder


def save(folder: RunFolder, step: int, metrics_bytes: int) -> None:
    path = folder.checkpoint(step)
    path.mkdir(parents=True)
    (path / "adapter.safetensors").write_bytes(bytes([step]) * 100)
    file = {"path": "adapter.safetensors", "sha256": sha256_of(path / "adapter.safetensors"), "bytes": 100}
    manifest = {
        "schema": "poimen.checkpoint/1",
        "step": step,
        "files": [file],
        "metrics_bytes": metrics_bytes,
        "metrics_sha256": prefix_sha256(folder.metrics, metrics_bytes),
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
