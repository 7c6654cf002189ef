"""``poimen export-verl RUN OUT``: what a cluster needs to go on with a finished solo run on verl."""

from __future__ import annotations

import importlib.util
import json
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from poimen_exp.adapters.manifest import read_manifest
from poimen_exp.config.tree import resolved, verl_tree
from poimen_exp.errors import Refused, RunFailed
from poimen_exp.solo.checkpoint import CRITIC_WEIGHTS
from poimen_exp.solo.dry import loaded_setup
from poimen_exp.solo.export_launch import gates_launch, prompts_launch
from poimen_exp.solo.export_prompts import float32_engines, prompts_config, prompts_data
from poimen_exp.solo.plan import compile_settings
from poimen_exp.solo.plan_source import load_config
from poimen_exp.solo.settings import SoloSettings
from poimen_exp.solo.setup import GateSetup, Setup
from poimen_exp.tracking.files import read_json, write_json
from poimen_exp.tracking.integrity import verify_run
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.sums import sums_of, write_sums

SCHEMA = "poimen.export/1"
LAUNCH = "launch.sh"


@dataclass(frozen=True)
class SoloRun:
    """A finished run whose files were verified.

    Attributes:
        step: of the adapter that it exported.
    """

    folder: RunFolder
    cfg: DictConfig
    settings: SoloSettings
    step: int


def export_verl(run: Path, out: Path) -> Path:
    """Writes the folder ``out``: adapter, critic, data, configuration, semantics, launch file, checksums.

    The folder appears whole or not at all. What it holds was composed and validated by verl before.

    Raises:
        Refused: no finished solo run lies there, ``out`` exists, verl cannot run what the run did.
        RunFailed: a file of the run is damaged.
    """
    if out.exists():
        raise Refused(f"{out}: there already; expected the name of a new folder")
    found = finished_run(run)
    with _written_aside(out) as aside:
        shutil.copytree(found.folder.adapter, aside / "adapter")
        notes = _critic(found, aside)
        if found.settings.prompts is None:
            config, more = gates_config(found.cfg, out.absolute() / "adapter")
            _gates_data(found.settings, _same_setup(found), aside / "data")
            check_gates(config, aside / "adapter")
            launch = gates_launch(config)
        else:
            config, more = prompts_config(found.cfg, found.settings)
            _same_setup(found)
            prompts_data(found.settings, aside)
            check_with_verl(config)
            launch = prompts_launch(config, found.settings)
        (aside / "config.yaml").write_text(OmegaConf.to_yaml(config))
        write_json(aside / "semantics.json", _semantics(found, {**notes, **more}))
        write_sums(aside, sums_of(aside))
        (aside / LAUNCH).write_text(launch)  # not in the sums: its paths are to be set
        (aside / LAUNCH).chmod((aside / LAUNCH).stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return out


def finished_run(path: Path) -> SoloRun:
    """A finished solo run, its files verified."""
    folder = RunFolder.open(path, "read")
    result = folder.read_result()
    if result is None or not folder.adapter.is_dir():
        raise Refused(
            f"{path}: got a run without result.json or adapter/, expected a finished one: poimen resume {path}"
        )
    found, _ = verify_run(folder)
    if found.damaged:
        first = found.damaged[0]
        raise RunFailed(f"{path}: {len(found.damaged)} damaged files, first {first.file}: {first.problem}")
    cfg = load_config(folder.resolved)
    if cfg.backend != "solo":
        raise Refused(f"{path}: got a run of backend={cfg.backend}, expected solo: it is on verl already")
    settings, _ = compile_settings(cfg)
    return SoloRun(folder, cfg, settings, read_manifest(folder.adapter).step)


def _critic(run: SoloRun, out: Path) -> dict[str, str]:
    """Copies the value model's trained weights of the adapter's step, if the run has one."""
    critic = run.settings.critic
    if critic is None:
        return {}
    source = run.folder.checkpoint(run.step) / CRITIC_WEIGHTS
    if not source.is_file():
        raise RunFailed(f"{source}: missing; expected the critic beside the adapter of step {run.step}")
    (out / "critic").mkdir()
    shutil.copy(source, out / "critic" / CRITIC_WEIGHTS)
    write_json(
        out / "critic" / "critic.json",
        {
            "base_model": str(critic.path),
            "step": run.step,
            "lora_rank": critic.lora_rank,
            "lora_alpha": critic.lora_alpha,
        },
    )
    return {"critic": "its trained weights are in critic/; verl begins with critic.model.path and does not read them"}


def gates_config(cfg: DictConfig, adapter: Path) -> tuple[DictConfig, dict[str, str]]:
    """The configuration for ``backend=verl``, and what means another thing there than in the run."""
    out = OmegaConf.create(resolved(cfg))
    changes: dict[str, Any] = {
        "backend": "verl",
        "gates.warm_start.steps": 0,
        "actor_rollout_ref.model.lora_adapter_path": str(adapter),
        "trainer.resume_mode": "disable",
        "trainer.resume_from_path": None,
        "sweep.resume": None,
    }
    for path, value in {**changes, **float32_engines(cfg)}.items():
        OmegaConf.update(out, path, value, force_add=True)
    notes = {
        "start": "verl begins with adapter/; optimizer state, random state and counters of the run are not translated",
        "warm start": "done: gates.warm_start.steps is 0",
    }
    if cfg.actor_rollout_ref.actor.use_kl_loss:
        notes["reference"] = (
            "the frozen base under verl; in the run, the policy that its reinforcement learning began with"
        )
    return out, notes


def _same_setup(run: SoloRun) -> Setup:
    """What the run read; refused where data or reward were changed after it."""
    setup = loaded_setup(run.settings)
    then, now = read_json(run.folder.provenance)["identity"], setup.identity(run.settings)
    changed = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
    if changed:
        told = "; ".join(f"{key}: {then.get(key)} then, {now.get(key)} now" for key in changed)
        raise Refused(f"{run.folder.path}: what the run read was changed since: {told}")
    return setup


def _gates_data(settings: SoloSettings, setup: Setup, out: Path) -> None:
    """Which corpus, and which of its tasks on which side: the corpus itself stays where it is."""
    assert isinstance(setup, GateSetup)
    assert settings.corpus is not None
    corpus = setup.corpus
    out.mkdir()
    reference = {"path": str(settings.corpus.path.absolute()), "corpus_id": corpus.corpus_id, "sha256": corpus.sha256}
    write_json(out / "corpus.json", {**reference, "label_status": corpus.label_status})
    listed = [("manifest.json", corpus.manifest.sha256)] + [(f.path, f.sha256) for f in corpus.manifest.files]
    (out / "corpus.sha256").write_text("".join(f"{digest}  {name}\n" for name, digest in listed))
    sides = {"train": corpus.split("train"), "val": setup.val_tasks(settings.corpus.max_val_tasks)}
    write_json(out / "tasks.json", {side: [task.task_id for task in tasks] for side, tasks in sides.items()})


def check_gates(config: DictConfig, adapter: Path) -> None:
    """Refuses a configuration that the verl backend or verl itself would refuse; the machine is not looked at.

    Args:
        adapter: where the adapter lies now.
    """
    from poimen_exp.verl_backend.overlay import verl_config
    from poimen_exp.verl_backend.preflight import preflight

    here = config.copy()
    here.actor_rollout_ref.model.lora_adapter_path = str(adapter)
    preflight(here, machine=False)
    check_with_verl(verl_config(here, Path("checkpoints"), {"train": 1, "val": 1}, None))


def check_with_verl(config: DictConfig) -> None:
    """Refuses a configuration that verl itself would refuse.

    verl asks an installed vLLM whether it serves the rank; where there is none, the ranks that we know of decide.
    """
    from poimen_exp.adapters.lora_config import vllm_rank
    from poimen_exp.verl_backend.preflight import validate

    here = config.copy()
    if importlib.util.find_spec("vllm") is None:
        vllm_rank(config.actor_rollout_ref.model.lora_rank)
        here.actor_rollout_ref.rollout.name = "hf"
    validate(here)


def _semantics(run: SoloRun, notes: Mapping[str, str]) -> dict[str, Any]:
    """What each field meant in the run, and what is another under verl."""
    plan = json.loads(run.folder.plan.read_text()) if run.folder.plan.exists() else {}
    return {
        "schema": SCHEMA,
        "verl": verl_tree().version,
        "run": str(run.folder.path),
        "step": run.step,
        "differences": dict(notes),
        "fields": plan.get("fields", []),
    }


@contextmanager
def _written_aside(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    aside.mkdir()
    try:
        yield aside
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
