"""Which engine a run gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from poimen_exp.config.compose import compose_config
from poimen_exp.config.paths import asset
from poimen_exp.solo import engines
from poimen_exp.solo.engine import TransformersEngine
from poimen_exp.solo.engines import make_engine, samples_with_vllm
from poimen_exp.solo.plan import compile_settings
from poimen_exp.solo.policy import Policy, load_codec


class OnGpu:
    """A policy that says it is on a GPU, for the choice of an engine."""

    device = torch.device("cuda")

    def __init__(self, policy: Policy) -> None:
        self.sampler, self.model = policy.sampler, policy.model


def test_vllm_samples_where_there_is_a_gpu_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = compile_settings(compose_config(["+experiment=quickstart", "actor_rollout_ref.rollout.name=vllm"]))
    assert settings.rollout.engine == "vllm"
    codec = load_codec(Path(asset("quickstart/model")))
    policy = Policy(settings.model, torch.device("cpu"))
    on_gpu: Any = OnGpu(policy)
    said: list[str] = []
    monkeypatch.setattr(engines, "_vllm", lambda *_: "vllm")
    monkeypatch.setattr(engines, "find_spec", lambda name: name)
    bf16 = replace(settings, model=replace(settings.model, dtype="bfloat16"))
    assert make_engine(bf16, on_gpu, codec, said.append) == "vllm"
    assert samples_with_vllm(bf16, on_gpu.device)
    assert isinstance(make_engine(bf16, policy, codec, said.append), TransformersEngine)
    assert not samples_with_vllm(bf16, policy.device)
    other = replace(settings, rollout=replace(settings.rollout, engine="hf"))
    assert isinstance(make_engine(other, on_gpu, codec, said.append), TransformersEngine)
    assert said == []
    assert isinstance(make_engine(settings, on_gpu, codec, said.append), TransformersEngine)
    assert not samples_with_vllm(settings, on_gpu.device)
    monkeypatch.setattr(engines, "find_spec", lambda _: None)
    assert isinstance(make_engine(bf16, on_gpu, codec, said.append), TransformersEngine)
    assert not samples_with_vllm(bf16, on_gpu.device)
    assert said == [
        "rollouts by the transformers engine: on a GPU vLLM's LoRA kernels take bfloat16, and the model is float32",
        "rollouts by the transformers engine: the package vllm is not installed (extra vllm)",
    ]


def test_what_vllm_may_take_comes_from_verls_keys() -> None:
    keys = ("gpu_memory_utilization=0.35", "enforce_eager=true", "name=hf")
    overrides = [f"actor_rollout_ref.rollout.{key}" for key in keys]
    rollout = compile_settings(compose_config(["+experiment=quickstart", *overrides]))[0].rollout
    assert (rollout.memory_share, rollout.enforce_eager, rollout.engine) == (0.35, True, "hf")
