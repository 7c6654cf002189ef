"""``poimen export-verl``: a finished run as a folder that verl goes on from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from warm import ON_A_CPU, Warm

from poimen_exp import app
from poimen_exp.errors import Refused, RunFailed
from poimen_exp.solo.export_verl import export_verl, finished_run
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.sums import read_sums, sums_of
from poimen_exp.verl_backend.export import lora_tensors

from .bases import base
from .support import CORPUS, poimen

pytestmark = pytest.mark.slow

GATES_RUN = (
    "corpus.chunk_tokens=160",
    "corpus.max_val_tasks=4",
    "trainer.val_before_train=false",  # the best step is then a trained one
    "data.max_prompt_length=320",
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.override_config={attn_implementation:eager}",
    "tracking.wandb=disabled",
)
# What a CPU needs of verl (conf/experiment/verl_smoke.yaml).
ON_CPU = (
    "trainer.device=cpu",
    "actor_rollout_ref.rollout.name=transformers",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.num_gpus=1",
    "+ray_kwargs.ray_init.include_dashboard=false",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)


@pytest.fixture(scope="module", autouse=True)
def engines() -> None:
    """Imports what verl's own checks import, with its warnings silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl.trainer.ppo.utils
        import verl.utils.config  # noqa: F401


def finished(cfg: DictConfig, folder: Path) -> Path:
    app.run_in(cfg, folder)
    return folder


@pytest.fixture(scope="module")
def gates_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    return finished(base("gates", folder, GATES_RUN), folder / "run")


@pytest.fixture(scope="module")
def gates_export(gates_run: Path) -> Path:
    return export_verl(gates_run, gates_run.parent / "export")


@pytest.fixture(scope="module")
def gae_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gae")
    more = ("tracking.wandb=disabled", "algorithm.use_kl_in_reward=false", "critic.strategy=fsdp2")
    return export_verl(finished(base("gae", folder, more), folder / "run"), folder / "export")


def test_the_export_of_a_gates_run_has_its_parts_and_their_hashes(gates_run: Path, gates_export: Path) -> None:
    names = {str(path.relative_to(gates_export)) for path in gates_export.rglob("*") if path.is_file()}
    assert names == {
        "SHA256SUMS",
        "config.yaml",
        "semantics.json",
        "launch.sh",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "adapter/poimen.json",
        "data/corpus.json",
        "data/corpus.sha256",
        "data/tasks.json",
    }
    sums = read_sums(gates_export)
    assert sums == {name: digest for name, digest in sums_of(gates_export).items() if name != "launch.sh"}
    assert sums["adapter/adapter_model.safetensors"] == sums_of(gates_run / "adapter")["adapter_model.safetensors"]
    assert os.access(gates_export / "launch.sh", os.X_OK)


def test_the_data_says_which_corpus_and_which_tasks(gates_export: Path) -> None:
    corpus = json.loads((gates_export / "data" / "corpus.json").read_text())
    tasks = json.loads((gates_export / "data" / "tasks.json").read_text())
    assert (corpus["path"], corpus["label_status"]) == (CORPUS, "constructed")
    assert len(tasks["val"]) == 4
    assert set(tasks["train"]).isdisjoint(tasks["val"])
    checked = subprocess.run(["sha256sum", "-c", gates_export / "data" / "corpus.sha256"], cwd=CORPUS, check=False)
    assert checked.returncode == 0


def test_the_configuration_keeps_the_objective_and_begins_with_the_adapter(gates_run: Path, gates_export: Path) -> None:
    before, after = OmegaConf.load(gates_run / "resolved.yaml"), OmegaConf.load(gates_export / "config.yaml")
    assert (before.backend, after.backend) == ("solo", "verl")
    for path in (
        "algorithm",
        "data",
        "alpha",
        "advantage",
        "actor_rollout_ref.actor.optim",
        "actor_rollout_ref.rollout",
    ):
        assert OmegaConf.select(before, path) == OmegaConf.select(after, path), path
    assert after.actor_rollout_ref.model.lora_adapter_path == str(gates_export / "adapter")
    assert after.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "fp32"
    semantics = json.loads((gates_export / "semantics.json").read_text())
    assert set(semantics["differences"]) == {"start", "warm start", "reference"}
    assert {entry["field"] for entry in semantics["fields"]} >= {"alpha", "data.train_batch_size"}


def test_a_launch_stops_where_a_file_of_the_export_or_the_corpus_was_changed(
    gates_export: Path, tmp_path: Path
) -> None:
    (tmp_path / "corpus.jsonl").write_text("{}")
    launch = [str(gates_export / "launch.sh")]
    run = {**os.environ, "POIMEN": "false", "RUN": str(tmp_path / "run")}
    other = subprocess.run(launch, env={**run, "CORPUS": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert "corpus.jsonl: FAILED" in other.stdout
    said = subprocess.run(launch, env={**run, "POIMEN": "echo"}, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"run {gates_export}/config.yaml --folder {tmp_path}/run actor_rollout_ref.model.path=")
    config = gates_export / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("alpha: 0.9", "alpha: 0.8"))
    changed = subprocess.run(launch, env=run, capture_output=True, text=True, check=False)
    config.write_text(text)
    assert "config.yaml: FAILED" in changed.stdout
    assert changed.returncode != 0


def test_a_gae_run_carries_its_critic_its_prompts_and_its_reward(gae_export: Path) -> None:
    from safetensors.torch import load_file

    names = {str(path.relative_to(gae_export)) for path in gae_export.rglob("*") if path.is_file()}
    assert names >= {
        "critic/critic.safetensors",
        "data/train-0.parquet",
        "data/val-0.parquet",
        "reward.py",
        "launch.sh",
    }
    run = gae_export.parent / "run"
    step = json.loads((run / "result.json").read_text())["best_step"]
    saved = load_file(run / "checkpoints" / f"global_step_{step}" / "critic.safetensors")
    assert load_file(gae_export / "critic" / "critic.safetensors").keys() == saved.keys()
    config = OmegaConf.load(gae_export / "config.yaml")
    assert (config.algorithm.adv_estimator, config.reward.custom_reward_function.path) == ("gae", "reward.py")
    assert "rewards" not in config  # verl's tree alone
    assert "data.train_files=\"['$HERE/data/train-0.parquet']\"" in (gae_export / "launch.sh").read_text()


def test_the_exported_reward_scores_as_the_provider_did(gae_export: Path) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("exported_reward", gae_export / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.compute_score("x", "The \\boxed{Paris}!", "paris") == 1.0
    assert module.compute_score("x", "London", "paris", {"index": 1}) == 0.0


def test_what_cannot_be_exported_is_refused(
    gates_run: Path, gates_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refused, match="there already; expected the name of a new folder"):
        export_verl(gates_run, gates_export)
    assert poimen(monkeypatch, "export-verl", str(tmp_path), str(tmp_path / "out")) == 2
    adapter = gates_run / "adapter" / "adapter_model.safetensors"
    kept = adapter.read_bytes()
    adapter.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(RunFailed, match=r"1 damaged files, first adapter/adapter_model.safetensors: got sha256"):
        export_verl(gates_run, tmp_path / "out")
    adapter.write_bytes(kept)
    result = gates_run / "result.json"
    text = result.read_text()
    result.unlink()
    with pytest.raises(Refused, match="expected a finished one: poimen resume"):
        export_verl(gates_run, tmp_path / "out")
    result.write_text(text)
    assert list(tmp_path.iterdir()) == []


def test_data_that_was_changed_after_the_run_is_refused(gae_export: Path, tmp_path: Path) -> None:
    provenance = gae_export.parent / "run" / "provenance.json"
    kept = provenance.read_text()
    found = json.loads(kept)
    found["identity"]["data"] = "train 00, val 00"
    provenance.write_text(json.dumps(found))
    with pytest.raises(Refused, match=r"what the run read was changed since: data: train 00, val 00 then"):
        export_verl(gae_export.parent / "run", tmp_path / "out")
    provenance.write_text(kept)


def test_the_critic_is_that_of_the_adapters_step(gae_export: Path) -> None:
    run = gae_export.parent / "run"
    kept = (run / "result.json").read_text()
    # As where no validation beat a fresh start: the best step is 0, the adapter that of the last step.
    (run / "result.json").write_text(json.dumps({**json.loads(kept), "best_step": 0}))
    found = finished_run(run)
    (run / "result.json").write_text(kept)
    assert found.step == json.loads((run / "adapter" / "poimen.json").read_text())["step"] > 0


def test_a_reward_that_verl_cannot_compute_is_refused(gae_export: Path, tmp_path: Path) -> None:
    run = gae_export.parent / "run"
    kept = (run / "resolved.yaml").read_text()
    (run / "resolved.yaml").write_text(kept.replace("provider: exact_answer", "provider: target_length"))
    with pytest.raises(Refused, match="not the number of sampled tokens"):
        export_verl(run, tmp_path / "out")
    (run / "resolved.yaml").write_text(kept)


@pytest.mark.verl
def test_the_export_of_prompts_trains_a_step_with_verls_own_program(tmp_path: Path, warm_python: Warm) -> None:
    reward = tmp_path / "varied.py"  # the tiny model answers such prompts always alike: rewards by turns differ
    reward.write_text(
        "import itertools\n\nturns = itertools.count()\n\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(next(turns) % 3)\n"
    )
    more = (
        "tracking.wandb=disabled",
        "actor_rollout_ref.model.override_config={attn_implementation:eager}",
        "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={reward}",
    )
    export = export_verl(finished(base("prompts", tmp_path, more), tmp_path / "run"), tmp_path / "export")
    environment = {
        **os.environ,
        **warm_python.for_ray(),
        "PYTHON": str(warm_python.python),
        "RUN": str(tmp_path / "checkpoints"),
        "GPUS_PER_NODE": "1",
        "OMP_NUM_THREADS": "1",
        # What backend=verl sets for a CPU by itself.
        **ON_A_CPU,
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
        "RAY_prestart_worker_first_driver": "0",
    }
    command = [str(export / "launch.sh"), *ON_CPU, "actor_rollout_ref.actor.use_torch_compile=false",
               "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false", "trainer.logger=[console]",
               "reward.num_workers=1"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "1"
    norm = re.search(r"actor/grad_norm:(?:np\.float64\()?([0-9.e+-]+)", done.stdout)
    assert norm is not None
    assert float(norm[1]) > 0.0
    trained, begun = (
        {name.split(".layers.")[1].replace(".default", ""): value for name, value in tensors.items()}
        for tensors in (
            lora_tensors(tmp_path / "checkpoints" / "global_step_1" / "actor"),
            load_file(export / "adapter" / "adapter_model.safetensors"),
        )
    )
    assert trained.keys() == begun.keys()
    moved = max(float((value - begun[name]).abs().max()) for name, value in trained.items())
    assert 0.0 < moved < 0.05  # from the run's adapter, not from a fresh one


def test_the_export_trains_a_step_on_verl(gates_export: Path, tmp_path: Path, warm_python: Warm) -> None:
    folder, poimen = tmp_path / "verl", tmp_path / "poimen"
    poimen.write_text(f'#!/bin/sh\nexec {warm_python.python} {Path(sys.executable).with_name("poimen")} "$@"\n')
    poimen.chmod(0o755)
    environment = {
        **os.environ,
        **warm_python.for_ray(),
        "POIMEN": str(poimen),
        "RUN": str(folder),
        "GPUS_PER_NODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [str(gates_export / "launch.sh"), *ON_CPU], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    opened = RunFolder.open(folder, "read")
    result = opened.read_result()
    assert result is not None
    assert (result.status, result.step) == ("completed", 1)
    line = opened.read_lines()[-1]
    assert line.metrics["training/sync/trainer_base_diff"] > 1e-3  # it began with the run's adapter, not a fresh one
