"""Checkpoints: everything a run needs to go on as if it had not stopped, complete or not there."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poimen_exp.errors import RunFailed
from poimen_exp.solo.settings import AdapterWeights
from poimen_exp.tracking.files import fsync_folder, prefix_sha256, sha256_of
from poimen_exp.tracking.run_folder import RunFolder

MANIFEST = "manifest.json"
CRITIC_WEIGHTS, CRITIC_OPTIMIZER = "critic.safetensors", "critic_optimizer.pt"
SCHEMA = "poimen.checkpoint/1"


@dataclass(frozen=True)
class Progress:
    """Where a run is: counters that must survive a stop.

    Attributes:
        step: last finished step.
        best_step, best_value: of ``val/reward/total``.
        bad_validations: validations in a row without a better value.
        optimizer_steps, skipped, skipped_in_a_row: optimizer steps taken and left out.
        groups, samples: prompts and rollouts so far.
        first_step: step that the run began at: 0, or that of another run's checkpoint.
    """

    step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    first_value: float | None = None
    bad_validations: int = 0
    optimizer_steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    groups: int = 0
    samples: int = 0
    first_step: int = 0

    def validated(self, value: float, min_delta: float) -> Progress:
        """Progress after a validation at ``step`` gave ``value``."""
        first = value if self.first_value is None else self.first_value
        if self.best_value is None or value > self.best_value + min_delta:
            return replace(self, best_value=value, best_step=self.step, bad_validations=0, first_value=first)
        return replace(self, bad_validations=self.bad_validations + 1, first_value=first)

    def adapter_step(self, began_fresh: bool, weights: AdapterWeights) -> int:
        """Step whose weights become the run's adapter: the best validation's, or with ``weights="last"`` the last.

        The last too where nothing was validated, or where no validation beat the start of a run that began with
        a fresh adapter: that one changes nothing, and no server mounts it.
        """
        if weights == "last" or self.best_step is None or (self.best_step == 0 and began_fresh):
            return self.step
        return self.best_step


@dataclass(frozen=True)
class Trained:
    """Weights of a role, and its optimizer and schedule."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    schedule: Mapping[str, Any]


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds besides progress."""

    actor: Trained
    reference: Mapping[str, Tensor]
    identity: Mapping[str, str]
    """What must be equal for a run to go on: corpus, model, tokenizer."""
    critic: Trained | None = None


def save_checkpoint(folder: RunFolder, progress: Progress, state: TrainState, metrics_bytes: int) -> Path:
    """Writes the checkpoint of ``progress.step``: aside, synced, manifest last, then renamed. A kill at any moment
    leaves the older checkpoints and at most folders without a final name.
    """
    from safetensors.torch import save_file

    target = folder.checkpoint(progress.step)
    aside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _save_role(state.actor, aside / "adapter.safetensors", aside / "optimizer.pt")
    if state.critic is not None:
        _save_role(state.critic, aside / CRITIC_WEIGHTS, aside / CRITIC_OPTIMIZER)
    save_file(dict(state.reference), aside / "reference.safetensors")
    torch.save(_rng_state(), aside / "rng.pt")
    (aside / "progress.json").write_text(json.dumps({**asdict(progress), "identity": dict(state.identity)}, indent=1))
    files = [
        {"path": path.name, "sha256": sha256_of(path), "bytes": path.stat().st_size} for path in sorted(aside.iterdir())
    ]
    manifest = {
        "schema": SCHEMA,
        "step": progress.step,
        "metrics_bytes": metrics_bytes,
        "metrics_sha256": prefix_sha256(folder.metrics, metrics_bytes),
        "files": files,
    }
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in aside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    replaced = _hide(target) if target.exists() else None  # of a step that is being replayed
    aside.rename(target)
    fsync_folder(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced)
    return target


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose hashes were verified. ``folder`` is that of its run."""

    folder: Path
    progress: Progress
    state: TrainState
    rng: Mapping[str, Any]
    metrics_bytes: int


def load_checkpoint(path: Path) -> LoadedCheckpoint:
    """Reads a checkpoint and verifies every file of it.

    Raises:
        RunFailed: a file is missing or does not have the hash that the manifest gives; the message names it.
    """
    from safetensors.torch import load_file

    manifest = _json(path / MANIFEST, "metrics_bytes", "files")
    for entry in manifest["files"]:
        file = path / entry["path"]
        if not file.exists() or sha256_of(file) != entry["sha256"]:
            raise RunFailed(
                f"{file}: damaged or missing; expected sha256 {entry['sha256']}; "
                f"delete {path} to use an older checkpoint"
            )
    progress, identity = load_progress(path)
    critic = None
    if (path / CRITIC_WEIGHTS).exists():
        critic = _load_role(path / CRITIC_WEIGHTS, path / CRITIC_OPTIMIZER)
    actor = _load_role(path / "adapter.safetensors", path / "optimizer.pt")
    state = TrainState(actor, load_file(path / "reference.safetensors"), identity, critic)
    rng = torch.load(path / "rng.pt", weights_only=True)
    run = path.parent.parent.absolute()
    return LoadedCheckpoint(run, progress, state, rng, int(manifest["metrics_bytes"]))


def load_progress(path: Path) -> tuple[Progress, dict[str, str]]:
    """Counters of a checkpoint, and the identity of its run; hashes are not looked at.

    Raises:
        RunFailed: the file is damaged.
    """
    found = _json(path / "progress.json", "step", "identity")
    identity = found.pop("identity")
    return Progress(**found), identity


def _json(file: Path, *keys: str) -> dict[str, Any]:
    """The object in a file that must have these keys."""
    try:
        found = json.loads(file.read_text())
        if not (isinstance(found, dict) and found.keys() >= set(keys)):
            raise ValueError(f"no {' or '.join(keys)}")
    except (OSError, ValueError) as error:
        raise RunFailed(f"{file}: damaged: {error}; delete {file.parent} to use an older checkpoint") from error
    return found


def _save_role(role: Trained, weights: Path, optimizer: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(role.weights), weights)
    torch.save({"optimizer": role.optimizer, "schedule": role.schedule}, optimizer)


def _load_role(weights: Path, optimizer: Path) -> Trained:
    from safetensors.torch import load_file

    trained = torch.load(optimizer, weights_only=True)
    return Trained(load_file(weights), trained["optimizer"], trained["schedule"])


def prune_checkpoints(folder: RunFolder, keep: int | None, best_step: int | None) -> None:
    """Deletes all but the newest ``keep`` complete checkpoints and the best one; folders a kill left unfinished go."""
    for leftover in (*folder.checkpoints.glob(".*.writing"), *folder.checkpoints.glob(".*.removing")):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep is None:
        return
    steps = folder.checkpoint_steps()
    for step in steps[: max(len(steps) - keep, 0)]:
        if step != best_step:
            shutil.rmtree(_hide(folder.checkpoint(step)))


def _hide(checkpoint: Path) -> Path:
    """Renames a checkpoint before it is deleted: a kill in the middle leaves no half of one that counts."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removing")
    shutil.rmtree(hidden, ignore_errors=True)
    return checkpoint.rename(hidden)


def _rng_state() -> dict[str, Any]:
    name, keys, place, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(place),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Puts the process's own generators where ``state`` has them."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
