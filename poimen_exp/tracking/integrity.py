"""Whether the files of a run are what was written: hashes, log prefixes, forms. Nothing is reported before this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from poimen_exp.errors import PoimenError, RunFailed
from poimen_exp.tracking.files import prefix_sha256, read_json, sha256_of
from poimen_exp.tracking.lock import LOCK_NAME, live_holder
from poimen_exp.tracking.metrics_log import MetricLine, MetricsRead, by_step, check_offset, read_metrics
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.sums import SUMS_NAME, read_sums
from poimen_exp.tracking.trajectories import RolloutRecord, read_trajectories

T = TypeVar("T")
CHECKPOINT_SCHEMA = "poimen.checkpoint/1"


class ManifestFile(msgspec.Struct, frozen=True):
    """A file of a checkpoint, its path relative to the checkpoint's folder."""

    path: str
    sha256: str
    bytes: int


class CheckpointManifest(msgspec.Struct, frozen=True):
    """``manifest.json`` of a checkpoint, written last. ``metrics_bytes``, ``metrics_sha256``: length and hash of
    ``metrics.jsonl`` at that time (the hash is null in older checkpoints)."""

    schema: str
    step: int
    files: tuple[ManifestFile, ...]
    metrics_bytes: int
    metrics_sha256: str | None = None


@dataclass(frozen=True)
class Finding:
    """A damaged file (relative to the run folder) and what is wrong with it."""

    file: str
    problem: str


@dataclass
class Integrity:
    """What was found.

    ``notes`` tell what is no damage: a live or killed writer, an unfinished line, a checkpoint without its manifest.
    """

    damaged: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verified: int = 0
    """Files that are as they were written."""
    live: bool = False
    """Whether a process was writing the run when the verification began."""


def verify_run(
    folder: RunFolder, on_rollout: Callable[[Path, RolloutRecord], None] | None = None
) -> tuple[Integrity, MetricsRead]:
    """Verifies every file of a run that can be verified.

    Args:
        on_rollout: told of each rollout while its file is read, so that large files are read once.

    Returns:
        The findings, and the metrics (empty where the log is damaged).
    """
    found = Integrity()
    _note_state(folder, found)
    for path in (folder.provenance, folder.plan, folder.gate_check):
        if path.exists():
            _try(folder, found, path, partial(read_json, path))
    if folder.resolved.exists():
        _try(folder, found, folder.resolved, partial(_verify_yaml, folder.resolved))
    steps = folder.checkpoint_steps()  # before the log is read: the lines of a later checkpoint would not be in it
    read = MetricsRead((), (), 0)
    if folder.metrics.exists():
        read = _try(folder, found, folder.metrics, partial(read_metrics, folder.metrics)) or read
    else:
        found.damaged.append(Finding(folder.metrics.name, "missing"))
    if read.unfinished_bytes:
        found.notes.append(f"metrics.jsonl: the last line was not finished ({read.unfinished_bytes} bytes)")
    for step in steps:
        with _unless_taken_away(folder, found, folder.checkpoint(step)):
            _verify_checkpoint(folder, found, step, read)
    sums = _trajectory_sums(folder, found)
    for path, step in folder.trajectory_files().items():
        with _unless_taken_away(folder, found, path):
            _try(folder, found, path, partial(_verify_rollouts, path, step, sums.get(path.name), on_rollout))
    _note_tails(folder, found)
    if folder.result.exists():
        with _unless_taken_away(folder, found, folder.result):
            _try(folder, found, folder.result, partial(_verify_result, folder, read))
    if folder.adapter.exists():
        _verify_adapter(folder, found)
    return found, read


def read_checkpoint_manifest(path: Path) -> CheckpointManifest:
    """The manifest of a checkpoint folder.

    Raises:
        RunFailed: not of this form, or a file path that leaves the folder.
    """
    file = path / "manifest.json"
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=CheckpointManifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunFailed(f"{file}: damaged: {error}") from error
    if manifest.schema != CHECKPOINT_SCHEMA:
        raise RunFailed(f"{file}: got schema {manifest.schema!r}, expected {CHECKPOINT_SCHEMA!r}")
    for entry in manifest.files:
        inside = PurePosixPath(entry.path)
        if inside.is_absolute() or ".." in inside.parts:
            raise RunFailed(f"{file}: damaged: {entry.path!r} leaves the checkpoint")
    return manifest


def _note_state(folder: RunFolder, found: Integrity) -> None:
    holder = live_holder(folder.path)
    found.live = holder is not None
    if holder is not None:
        found.notes.append(f"being written by {holder}")
    elif not folder.result.exists():
        killed = " (its lock is still there: it was killed)" if (folder.path / LOCK_NAME).exists() else ""
        found.notes.append(f"no result.json: the run did not finish{killed}; go on with `poimen resume {folder.path}`")
    for step in folder.checkpoint_steps(complete=False):
        found.notes.append(f"checkpoints/global_step_{step}: no manifest: it was not finished, and is not used")


def _verify_checkpoint(folder: RunFolder, found: Integrity, step: int, read: MetricsRead) -> None:
    path = folder.checkpoint(step)
    manifest = _try(folder, found, path / "manifest.json", partial(read_checkpoint_manifest, path))
    if manifest is None:
        return
    if manifest.step != step:
        found.damaged.append(Finding(_name(folder, path / "manifest.json"), f"says step {manifest.step}"))
    for entry in manifest.files:
        file = path / entry.path
        _try(folder, found, file, partial(_verify_file, file, entry))
    if read.offsets:
        _try(folder, found, folder.metrics, partial(_verify_log_prefix, folder.metrics, read, manifest))
    listed = {entry.path for entry in manifest.files} | {"manifest.json"}
    for file in sorted(path for path in path.rglob("*") if path.is_file()):
        if str(file.relative_to(path)) not in listed:
            found.notes.append(f"{_name(folder, file)}: not in the checkpoint's manifest: it is not used")


def _verify_log_prefix(path: Path, read: MetricsRead, manifest: CheckpointManifest) -> None:
    check_offset(path, read, manifest.step, manifest.metrics_bytes)
    if manifest.metrics_sha256 in (None, prefix_sha256(path, manifest.metrics_bytes)):
        return
    raise RunFailed(
        f"its first {manifest.metrics_bytes} bytes are not those that step {manifest.step}'s checkpoint was saved with"
    )


def _verify_yaml(path: Path) -> None:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunFailed(f"damaged: not YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(tree, dict):
        raise RunFailed("damaged: expected a mapping")


def _trajectory_sums(folder: RunFolder, found: Integrity) -> dict[str, str]:
    """Hashes of the files of rollouts; one that is listed and gone is damage, one that is not listed is noted."""
    path = folder.trajectories / SUMS_NAME
    if not path.exists():
        return {}
    sums = _try(folder, found, path, partial(read_sums, folder.trajectories)) or {}
    there = {file.name for file in folder.trajectory_files()}
    missing = sums.keys() - there
    if missing:  # a rewind meanwhile has taken the names out before it moved the files
        missing &= read_sums(folder.trajectories).keys()
    found.damaged += [Finding(f"trajectories/{name}", "missing") for name in sorted(missing)]
    found.notes += [
        f"trajectories/{name}: no hash: the run was killed behind it" for name in sorted(there - sums.keys())
    ]
    return sums


def _note_tails(folder: RunFolder, found: Integrity) -> None:
    kept = sorted(path.name for path in folder.recovery_tails.iterdir()) if folder.recovery_tails.is_dir() else []
    if kept:
        found.notes.append(f"recovery-tails: {len(kept)} kept of what a resumed run did again: {', '.join(kept)}")


def _verify_file(path: Path, entry: ManifestFile) -> None:
    if not path.is_file():
        raise RunFailed("missing")
    if path.stat().st_size != entry.bytes:
        raise RunFailed(f"got {path.stat().st_size} bytes, expected {entry.bytes}")
    digest = sha256_of(path)
    if digest != entry.sha256:
        raise RunFailed(f"got sha256 {digest}, expected {entry.sha256}")


def _verify_rollouts(
    path: Path, step: int, digest: str | None, on_rollout: Callable[[Path, RolloutRecord], None] | None
) -> None:
    if digest is not None and sha256_of(path) != digest:
        raise RunFailed(f"got sha256 {sha256_of(path)}, expected {digest}")
    for record in read_trajectories(path):
        if record.step != step:
            raise RunFailed(f"{path}: damaged: holds a rollout of step {record.step}")
        if on_rollout is not None:
            on_rollout(path, record)


def _verify_result(folder: RunFolder, read: MetricsRead) -> None:
    result = folder.read_result()
    if result is None:  # a resume has taken it away
        return
    line: MetricLine | None = None if result.best_step is None else by_step(read.lines).get(result.best_step)
    logged = None if line is None else line.metrics.get(result.objective_name)
    given = result.objective_value
    if logged is not None and given is not None and not math.isclose(logged, given, rel_tol=1e-6, abs_tol=1e-9):
        raise RunFailed(
            f"{result.objective_name} at step {result.best_step}: got {given}, but metrics.jsonl has {logged}"
        )
    if result.adapter is not None and not result.adapter.is_dir():
        raise RunFailed(f"its adapter {result.adapter} is missing")


def _verify_adapter(folder: RunFolder, found: Integrity) -> None:
    from poimen_exp.adapters.manifest import read_manifest

    manifest = _try(folder, found, folder.adapter / "poimen.json", partial(read_manifest, folder.adapter))
    for name, digest in () if manifest is None else manifest.sha256.items():
        path = folder.adapter / name
        size = path.stat().st_size if path.is_file() else 0
        entry = ManifestFile(name, digest, size)
        _try(folder, found, path, partial(_verify_file, path, entry))


@contextmanager
def _unless_taken_away(folder: RunFolder, found: Integrity, path: Path) -> Iterator[None]:
    """Drops what the block finds damaged if ``path`` is gone behind it: a live run prunes, rewinds and resumes."""
    before = len(found.damaged)
    yield
    if not path.exists() and (found.live or live_holder(folder.path) is not None):
        del found.damaged[before:]


def _try(folder: RunFolder, found: Integrity, path: Path, check: Callable[[], T]) -> T | None:
    try:
        value = check()
    except PoimenError as error:
        found.damaged.append(Finding(_name(folder, path), str(error).removeprefix(f"{path}: ")))
        return None
    except OSError as error:
        found.damaged.append(Finding(_name(folder, path), f"cannot be read: {error.strerror}"))
        return None
    found.verified += 1
    return value


def _name(folder: RunFolder, path: Path) -> str:
    return str(path.relative_to(folder.path))
