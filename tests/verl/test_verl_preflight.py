"""What is refused before Ray starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from poimen_exp.config.compose import compose_config
from poimen_exp.config.paths import asset
from poimen_exp.errors import Refused
from poimen_exp.verl_backend import preflight as module
from poimen_exp.verl_backend.checkpoint import ResumePoint
from poimen_exp.verl_backend.overlay import verl_config
from poimen_exp.verl_backend.preflight import check_tasks, preflight
from poimen_exp.verl_backend.settings import settings_of

Smoke = Callable[..., DictConfig]


def test_the_smoke_experiment_passes_on_a_machine_without_a_gpu(smoke: Smoke) -> None:
    preflight(smoke())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.v1.trainer_mode=colocate_async", r"trainer\.v1\.trainer_mode: got colocate_async, expected sync"),
        ("algorithm.adv_estimator=grpo", r"algorithm\.adv_estimator: got grpo, expected poimen_gates"),
        ("algorithm.use_kl_in_reward=true", r"algorithm\.use_kl_in_reward: got True, expected False"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "mini-batches hold unequal numbers of rows"),
        ("actor_rollout_ref.actor.strategy=fsdp", r"actor\.strategy: got fsdp, expected fsdp2: .* an empty adapter"),
        ("actor_rollout_ref.model.lora_rank=0", r"lora_rank: got 0, expected at least 1"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", r"got 3, expected a divisor of data\.train_batch_size \(4\)"),
        ("actor_rollout_ref.rollout.n=1", r"rollout\.n: got 1, expected at least 2"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", r"a server takes 2 GPUs .* expected a divisor of"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=4", r"got 4, expected a divisor of the model's 2 atten"),
        ("actor_rollout_ref.rollout.name=vllm", r"got vllm, expected transformers with trainer\.device=cpu"),
        ("actor_rollout_ref.model.path=nowhere", r"model\.path: nowhere holds no config\.json"),
        ("actor_rollout_ref.model.lora_adapter_path=nowhere", r"lora_adapter_path: adapter nowhere: no such folder"),
        ("actor_rollout_ref.model.target_modules=[c_attn]", r"target module 'c_attn' is none of the base model's"),
        ("actor_rollout_ref.model.lora.rank=8", r"model\.lora\.rank: got 8, expected 0: that is Megatron's"),
        ("trainer.use_v1=false", r"trainer\.use_v1: got False, expected True .*: the gates run on verl's V1 trainer"),
        ("algorithm.filter_groups.enable=true", r"filter_groups\.enable: got True, expected False .* counted, not"),
        ("critic.enable=true", r"critic\.enable: got True, expected False .* need no critic"),
        ("distillation.enabled=true", r"distillation\.enabled: got True, expected False .* no teacher"),
        ("reward.reward_model.enable=true", r"reward_model\.enable: got True, expected False .* the gates' own"),
        ("trainer.val_only=true", r"trainer\.val_only: got True, expected False .* poimen eval"),
        ("actor_rollout_ref.hybrid_engine=false", r"hybrid_engine: got False, expected True .* shares its GPUs"),
        ("trainer.v1.sampler.custom_sampler.path=x.py", r"custom_sampler\.path: got x\.py, expected None"),
        ("data.custom_cls.path=x.py", r"data\.custom_cls\.path: got x\.py, expected None .* corpus\.path"),
        ("data.gen_batch_size=2", r"data\.gen_batch_size: got 2, expected None"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=0", r"ppo_mini_batch_size: got 0, expected a divisor"),
        ("trainer.total_training_steps=0", r"trainer\.total_training_steps: got 0, expected at least 1"),
        ("actor_rollout_ref.rollout.temperature=0", r"rollout\.temperature: got 0, expected above 0"),
        (
            "actor_rollout_ref.rollout.val_kwargs.do_sample=false",
            r"val_kwargs\.do_sample: got False at temperature 1\.0, expected True: .* val_kwargs\.temperature=0",
        ),
        ("gates.warm_start.steps=5", r"gates\.warm_start\.steps: got 5, expected 0 .* backend=solo"),
        ("trainer.test_freq=-1", r"trainer\.test_freq: got -1, expected at least 1"),
    ],
)
def test_a_configuration_that_cannot_train_is_refused_by_key(smoke: Smoke, override: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        preflight(smoke(override))


def test_every_finding_is_told_at_once(smoke: Smoke) -> None:
    with pytest.raises(Refused) as refusal:
        preflight(smoke("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.actor.strategy=fsdp"))
    assert len(str(refusal.value).splitlines()) == 2


def test_several_nodes_need_a_ray_cluster(smoke: Smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(Refused, match=r"trainer\.nnodes: got 2 without a Ray cluster; expected RAY_ADDRESS"):
        preflight(smoke("trainer.nnodes=2"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    preflight(smoke("trainer.nnodes=2"))


def test_more_gpus_than_the_machine_shows_are_refused(smoke: Smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(module, "_installed", lambda _: True)  # vLLM is there
    gpu = ("trainer.device=cuda", "actor_rollout_ref.rollout.name=vllm")
    preflight(smoke(*gpu))
    with pytest.raises(Refused, match=r"n_gpus_per_node: got 8, this machine shows 1 GPUs; set it to 1"):
        preflight(smoke(*gpu, "trainer.n_gpus_per_node=8"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.rollout.load_format=dummy", r"load_format: got dummy, expected safetensors"),
        ("actor_rollout_ref.rollout.name=hf", r"rollout\.name: got hf, expected one of vllm, sglang, trtllm"),
    ],
)
@pytest.mark.usefixtures("one_gpu")
def test_a_sampler_that_could_not_have_the_adapter_is_refused(smoke: Smoke, override: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        preflight(smoke("trainer.device=cuda", "actor_rollout_ref.rollout.name=vllm", override))


def test_a_model_folder_without_a_tokenizer_is_refused(smoke: Smoke, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused, match=r"model\.path: .* holds no tokenizer\.json"):
        preflight(smoke(f"actor_rollout_ref.model.path={tmp_path}"))


def test_an_adapter_of_another_rank_to_start_from_is_refused(
    smoke: Smoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from poimen_exp.adapters import preflight as adapters

    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 8, "target_modules": "all-linear"}')
    monkeypatch.setattr(adapters, "mount_check", lambda *_: None)  # it fits the model
    with pytest.raises(Refused, match=r"^actor_rollout_ref\.model\.lora_rank: got 4, expected 8, that of the adapter"):
        preflight(smoke(f"actor_rollout_ref.model.lora_adapter_path={tmp_path}"))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that shows one GPU and has every package."""
    import torch

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(module, "_installed", lambda _: True)


def smollm2(*overrides: str) -> DictConfig:
    places = (f"corpus.path={asset('quickstart/corpus')}", f"actor_rollout_ref.model.path={asset('quickstart/model')}")
    return compose_config(["+experiment=smollm2_verl", *places, *overrides])


TWO_GPUS = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")


@pytest.mark.usefixtures("one_gpu")
def test_the_gpu_experiment_passes_on_one_gpu_and_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    preflight(smollm2())
    with pytest.raises(Refused, match=r"n_gpus_per_node: got 2, this machine shows 1 GPUs; set it to 1"):
        preflight(smollm2(*TWO_GPUS))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    preflight(smollm2(TWO_GPUS[0]))
    preflight(smollm2(*TWO_GPUS))


def test_missing_packages_are_named_with_what_installs_them(smoke: Smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_installed", lambda _: False)
    with pytest.raises(Refused, match=r"TransferQueue: not installed"):
        preflight(smoke())
    with pytest.raises(Refused, match=r"got vllm, which is not installed here; expected it: uv sync --extra vllm"):
        preflight(smoke("trainer.device=cuda", "actor_rollout_ref.rollout.name=vllm"))


def test_splits_too_small_for_the_batches_are_refused(smoke: Smoke) -> None:
    check_tasks(smoke(), {"train": 4, "val": 1})
    with pytest.raises(Refused, match=r"train_batch_size: got 4, the corpus has 3 training tasks"):
        check_tasks(smoke(), {"train": 3, "val": 1})
    with pytest.raises(Refused, match="has no validation task"):
        check_tasks(smoke(), {"train": 4, "val": 0})


def test_a_verl_key_of_the_command_line_reaches_verl(smoke: Smoke, tmp_path: object) -> None:
    cfg = smoke("actor_rollout_ref.actor.clip_ratio_c=7.5", "+actor_rollout_ref.model.override_config.rope_theta=5")
    config = verl_config(cfg, tmp_path, {"train": 4, "val": 2}, None)  # type: ignore[arg-type]
    assert config.actor_rollout_ref.actor.clip_ratio_c == 7.5
    assert config.actor_rollout_ref.model.override_config.rope_theta == 5


def test_only_the_seams_differ_from_the_composed_configuration(smoke: Smoke, tmp_path: object) -> None:
    cfg = smoke()
    config = verl_config(cfg, tmp_path, {"train": 4, "val": 2}, None)  # type: ignore[arg-type]
    before, after = _flat(cfg), _flat(config)
    changed = {key for key in before.keys() | after.keys() if before.get(key, "absent") != after.get(key, "absent")}
    assert changed == {
        "actor_rollout_ref.actor.checkpoint.save_lora_only",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile",
        "actor_rollout_ref.actor.use_torch_compile",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path",
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        "data.custom_cls.name",
        "data.custom_cls.path",
        "data.train_files",
        "data.train_files.split",
        "data.train_files.tasks",
        "data.val_files",
        "data.val_files.split",
        "data.val_files.tasks",
        "reward.num_workers",
        "trainer.default_local_dir",
        "trainer.logger",
        "trainer.max_actor_ckpt_to_keep",
        "trainer.resume_mode",
        "trainer.save_freq",
        "trainer.v1.sampler.custom_sampler.name",
        "trainer.v1.sampler.custom_sampler.path",
        "transfer_queue.backend.SimpleStorage.total_storage_size",
        "transfer_queue.enable",
    }


def test_a_resumed_run_goes_on_from_its_checkpoint_and_does_not_validate_it_again(
    smoke: Smoke, tmp_path: object
) -> None:
    point = ResumePoint(tmp_path / "global_step_2", None, 0)  # type: ignore[operator, arg-type]
    config = verl_config(smoke(), tmp_path, {"train": 4, "val": 2}, point)  # type: ignore[arg-type]
    assert config.trainer.resume_mode == "resume_path"
    assert config.trainer.resume_from_path.endswith("global_step_2")
    assert config.trainer.val_before_train is False


def test_optimizer_steps_and_fixed_micro_batches_come_from_the_configuration(smoke: Smoke) -> None:
    settings = settings_of(smoke())
    assert (settings.mini_batches, settings.rows_multiple) == (2, 1)
    fixed = settings_of(
        smoke(
            "actor_rollout_ref.actor.use_dynamic_bsz=false",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=6",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        )
    )
    assert fixed.rows_multiple == 12  # a rank's rows must cut into fours and into sixes


def _flat(cfg: DictConfig, prefix: str = "") -> dict[str, object]:
    plain = OmegaConf.to_container(cfg, resolve=True)
    out: dict[str, object] = {}

    def walk(node: object, path: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{path}.{key}" if path else str(key))
        else:
            out[path] = node

    walk(plain, prefix)
    return out
