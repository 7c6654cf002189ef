"""What a run was made of: versions, commit, device, corpus, seed, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

LIBRARIES = (
    "poimen-exp", "accelerate", "hydra-core", "msgspec", "numpy", "omegaconf", "optuna", "peft", "ray", "safetensors",
    "tensordict", "tokenizers", "torch", "transferqueue", "transformers", "verl", "vllm", "wandb",
)  # fmt: skip

LabelStatus = Literal["constructed", "measured", "unmeasured"]


@dataclass(frozen=True)
class CorpusFacts:
    """Which corpus a run read. ``sha256`` covers the manifest and its files."""

    corpus_id: str
    sha256: str
    label_status: LabelStatus


@dataclass(frozen=True)
class GitState:
    """The checkout that the running code stands in. ``dirty``: tracked files differ from the commit."""

    commit: str
    dirty: bool


@dataclass(frozen=True)
class Provenance:
    """Content of ``provenance.json``. What is None did not exist or was not known.

    ``identity``: what must be equal in every part of the run: hashes of its data, and the reward that scores.
    """

    versions: Mapping[str, str]
    git: GitState | None
    python: str
    platform: str
    device: str
    cpus: int
    seed: int
    command: tuple[str, ...]
    working_folder: str
    corpus: CorpusFacts | None
    identity: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object as ``provenance.json`` holds it."""
        return {"schema": "poimen.provenance/1", **asdict(self), "command": list(self.command)}


def collect_provenance(
    *,
    seed: int,
    device: str,
    corpus: CorpusFacts | None = None,
    command: Sequence[str] | None = None,
    identity: Mapping[str, str] | None = None,
) -> Provenance:
    """The provenance of this process.

    Args:
        device: as ``describe_device`` says it.
        command: the command line; that of this process if left out.
        identity: what must be equal in every part of the run.
    """
    return Provenance(
        versions=library_versions(),
        git=git_state(Path(__file__).resolve().parent),
        python=platform.python_version(),
        platform=platform.platform(),
        device=device,
        cpus=len(os.sched_getaffinity(0)),
        seed=seed,
        command=tuple(sys.argv if command is None else command),
        working_folder=str(Path.cwd()),
        corpus=corpus,
        identity=dict(identity or {}),
    )


def library_versions() -> dict[str, str]:
    """Version of each library that is installed, read from its metadata: nothing is imported."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> GitState | None:
    """Commit of the checkout that tracks ``folder``.

    None without git, without a commit, and where the code is only installed inside somebody else's checkout.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None or not _git(folder, "ls-files", "."):
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if changes is None else GitState(commit, changes != "")


def describe_device(device: str) -> str:
    """A device as a reader wants it named: ``cuda: NVIDIA H200 x 1`` or ``cpu: <processor>, N cores``."""
    if device.startswith("cuda"):
        import torch

        return f"cuda: {torch.cuda.get_device_name()} x {torch.cuda.device_count()}"
    return f"cpu: {platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
