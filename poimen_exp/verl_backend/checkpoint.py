"""What a run adds to verl's checkpoints: progress, and a manifest that is written last and makes them complete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from poimen_exp.errors import Refused, RunFailed
from poimen_exp.solo.checkpoint import MANIFEST, SCHEMA, Progress
from poimen_exp.tracking.files import prefix_sha256, sha256_of, write_json
from poimen_exp.tracking.run_folder import RunFolder

PROGRESS = "progress.json"


@dataclass(frozen=True)
class ResumePoint:
    """A complete checkpoint to go on from."""

    path: Path
    progress: Progress
    metrics_bytes: int


def complete(target: Path, progress: Progress, identity: Mapping[str, str], metrics_bytes: int) -> None:
    """Writes progress and manifest into the folder that verl has just saved to.

    Args:
        identity: what must be equal for a run to go on: corpus, model.
        metrics_bytes: length of ``metrics.jsonl`` behind this step's line.
    """
    write_json(target / PROGRESS, {**asdict(progress), "identity": dict(identity)})
    files = [
        {"path": str(path.relative_to(target)), "sha256": sha256_of(path), "bytes": path.stat().st_size}
        for path in sorted(target.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    ]
    manifest = {
        "schema": SCHEMA,
        "step": progress.step,
        "metrics_bytes": metrics_bytes,
        "metrics_sha256": prefix_sha256(target.parents[1] / "metrics.jsonl", metrics_bytes),
        "files": files,
    }
    write_json(target / MANIFEST, manifest)


def newest(folder: RunFolder, identity: Mapping[str, str]) -> ResumePoint | None:
    """The newest complete checkpoint of a run; None where there is none.

    Raises:
        Refused: it belongs to another corpus or model.
        RunFailed: a file of it is missing or does not have its hash.
    """
    steps = folder.checkpoint_steps()
    return read(folder.checkpoint(steps[-1]), identity) if steps else None


def read(path: Path, identity: Mapping[str, str]) -> ResumePoint:
    """A complete checkpoint, its files verified."""
    manifest = json.loads((path / MANIFEST).read_text())
    for entry in manifest["files"]:
        file = path / entry["path"]
        if not file.exists() or sha256_of(file) != entry["sha256"]:
            raise RunFailed(
                f"{file}: damaged or missing; expected sha256 {entry['sha256']}; delete {path} "
                "to use an older checkpoint"
            )
    stored = json.loads((path / PROGRESS).read_text())
    was = stored.pop("identity")
    for name, value in identity.items():
        if was.get(name) != value:
            raise Refused(
                f"{path}: was trained with {name} {was.get(name)!r}, this run has {value!r}; a run goes on only "
                "with the same; start another run folder"
            )
    return ResumePoint(path, Progress(**stored), int(manifest["metrics_bytes"]))
