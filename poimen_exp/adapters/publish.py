"""From a run to a registry: find the adapter, check it, probe it, publish it; and check what was published."""

from __future__ import annotations

import shutil
from pathlib import Path

from poimen_exp.adapters.check import check_hashes, mount_check
from poimen_exp.adapters.files import folder_written_aside
from poimen_exp.adapters.manifest import CONFIG_NAME, MANIFEST_NAME, WEIGHTS_NAME, read_manifest
from poimen_exp.adapters.probe import ProbeReport, probe
from poimen_exp.adapters.registry import Published, Registry, check_name, parse_reference
from poimen_exp.errors import Refused


def adapter_folder(run: Path) -> Path:
    """The adapter of a run folder, of a single run's multirun folder, or the folder itself if it is an adapter.

    Raises:
        Refused: no adapter there; a sweep's folder, which holds several runs.
    """
    runs = sorted((path for path in run.glob("[0-9]*") if path.name.isdecimal()), key=lambda path: int(path.name))
    if len(runs) > 1:
        raise Refused(f"{run}: a folder of several runs; give one of them, for example {runs[0]}")
    candidates = (run, run / "adapter", run / "0" / "adapter")
    for folder in candidates:
        if (folder / CONFIG_NAME).is_file():
            return folder
    unfinished = next((path for path in (run, run / "0") if (path / "resolved.yaml").is_file()), None)
    raise Refused(
        f"{run}: no adapter there; looked for {CONFIG_NAME} in {', '.join(str(folder) for folder in candidates)}"
        + (f". The run has not finished: poimen resume {unfinished}" if unfinished is not None else "")
    )


def base_folder(adapter: Path, base: Path | None) -> Path:
    """The base model to check an adapter against: ``base``, or where the manifest says it was."""
    if base is not None:
        return base
    recorded = read_manifest(adapter).base_model
    if not Path(recorded.path).is_dir():
        raise Refused(
            f"adapter {adapter}: its base model {recorded.name} was at {recorded.path}, which is not here. Name the "
            "folder with --base"
        )
    return Path(recorded.path)


def publish_adapter(
    run: Path, name: str, registry: Registry, base: Path | None = None
) -> tuple[Published, ProbeReport]:
    """Checks, probes and publishes the adapter of a run.

    Raises:
        Refused: the name is none, told before the probe, which takes long; no adapter, or one that cannot be mounted.
    """
    check_name(name)
    folder = adapter_folder(run)
    manifest = read_manifest(folder)
    model = base_folder(folder, base)
    mount_check(folder, model)
    report = probe(folder, model, manifest.dtype)
    return registry.publish(folder, name), report


def verify_adapter(
    reference: str, registry: Registry, base: Path | None = None
) -> tuple[Published, ProbeReport | None]:
    """Fetches ``name[@version]`` and checks its hashes; keys, shapes, rank, base model and effect if there is a base.

    Returns:
        The version, and the probe's report; None where neither ``base`` nor the recorded folder is here.
    """
    name, version = parse_reference(reference)
    found = registry.show(name, version)
    folder = registry.fetch(name, found.version)
    check_hashes(folder)
    recorded = Path(found.manifest.base_model.path)
    model = base or (recorded if recorded.is_dir() else None)
    if model is None:
        return found, None
    mount_check(folder, model)
    return found, probe(folder, model, found.manifest.dtype)


def copy_adapter(adapter: Path, base: Path, out: Path) -> Path:
    """Copies a checked adapter folder to ``out``, whole or not at all."""
    if out.exists():
        raise Refused(f"{out}: exists already; name a new folder")
    mount_check(adapter, base)
    with folder_written_aside(out) as aside:
        for name in (CONFIG_NAME, WEIGHTS_NAME, MANIFEST_NAME):
            shutil.copyfile(adapter / name, aside / name)
        check_hashes(aside)
    return out


def resolve_adapter(reference: str, registry: Registry) -> tuple[Path, str]:
    """A local folder and a name for ``name[@version]`` in the registry, or for a path to a run or adapter folder."""
    path = Path(reference)
    if path.is_dir():
        folder = adapter_folder(path)
        return folder, read_manifest(folder).name or folder.resolve().name
    name, version = parse_reference(reference)
    return registry.fetch(name, version), name
