"""Which engine a run gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from poimen_exp.config.compose import compose_config
from poimen_exp.config.paths import asset
from poimen_exp.solo.engine import TransformersEngine
from poimen_exp.solo.engines import make_engine, vllm_missing
from poimen_exp.solo.plan import compile_settings
from poimen_exp.solo.policy import Policy, load_codec


def test_vllm_needs_a_gpu_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from poimen_exp.solo import engines

    assert "needs a GPU, the device is cpu" in str(vllm_missing(torch.device("cpu")))
    monkeypatch.setattr(engines, "find_spec", lambda _: None)
    assert "the package vllm is not installed" in str(vllm_missing(torch.device("cuda")))
    monkeypatch.setattr(engines, "find_spec", lambda name: name)
    assert vllm_missing(torch.device("cuda")) is None


def test_where_vllm_is_asked_for_and_missing_the_run_says_which_engine_samples() -> None:
    settings, _ = compile_settings(compose_config(["+experiment=quickstart", "actor_rollout_ref.rollout.name=vllm"]))
    assert settings.rollout.engine == "vllm"
    codec = load_codec(Path(asset("quickstart/model")))
    policy = Policy(settings.model, torch.device("cpu"))
    said: list[str] = []
    assert isinstance(make_engine(settings, policy, codec, said.append), TransformersEngine)
    assert said == ["rollouts by the transformers engine: vLLM in this process needs a GPU, the device is cpu"]
    other = replace(settings, rollout=replace(settings.rollout, engine="hf"))
    make_engine(other, policy, codec, said.append)
    assert len(said) == 1  # nothing to say where it was not asked for


def test_what_vllm_may_take_comes_from_verls_keys() -> None:
    keys = ("gpu_memory_utilization=0.35", "enforce_eager=true", "name=hf")
    overrides = [f"actor_rollout_ref.rollout.{key}" for key in keys]
    rollout = compile_settings(compose_config(["+experiment=quickstart", *overrides]))[0].rollout
    assert (rollout.memory_share, rollout.enforce_eager, rollout.engine) == (0.35, True, "hf")
