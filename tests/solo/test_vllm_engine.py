"""vLLM in process (on a CPU, in its own environment) beside the transformers engine: same ids, same log-probs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from poimen_exp.config.paths import asset
from poimen_exp.errors import Refused
from poimen_exp.gates.types import Prompt, Sampling
from poimen_exp.solo import vllm_engine as module
from poimen_exp.solo.engine import Request
from poimen_exp.solo.policy import Policy, load_codec
from poimen_exp.solo.vllm_engine import VllmEngine, VllmSettings, log_probs_mode

from .support import plain_log_probs, row
from .support import policy as some_policy

MAX_TOKENS = 12


def samplings(*pairs: tuple[float, float]) -> list[Sampling]:
    return [Sampling(temperature, top_p, -1, 8) for temperature, top_p in pairs]


def test_log_probs_of_the_sampling_temperature_or_none() -> None:
    assert log_probs_mode(samplings((1.0, 0.7), (0.0, 1.0))) == "raw_logprobs"
    assert log_probs_mode(samplings((0.7, 1.0), (1.0, 1.0))) == "processed_logprobs"
    with pytest.raises(Refused, match="expected temperature 1"):
        log_probs_mode(samplings((0.7, 0.9)))
    with pytest.raises(Refused, match="expected temperature 1"):
        log_probs_mode([Sampling(0.7, 1.0, 20, 8)])


class FakeVllm:
    """Stands where vLLM is imported from, and keeps what it is made with and asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[str, Any] = {}
        self.asked: dict[str, Any] = {}
        names = {
            "vllm": {"SamplingParams": lambda **given: self.asked.update(given), "TokensPrompt": dict},
            "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
            "vllm.engine.arg_utils": {"EngineArgs": lambda **given: self.made.update(given)},
            "vllm.v1.engine.llm_engine": {"LLMEngine": SimpleNamespace(from_engine_args=lambda _: self)},
        }
        for name, members in names.items():
            module = ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)

    def add_request(self, *_: Any, **__: Any) -> None:
        """Takes it."""


def test_only_the_stop_ids_end_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeVllm(monkeypatch)
    engine = object.__new__(VllmEngine)
    engine._stop, engine._asked, engine._lora, engine._engine = [2], 0, None, fake
    engine._add(Request(Prompt((5, 6), 0), Sampling(0.7, 0.9, -1, 8)))
    assert fake.asked["ignore_eos"] is True
    assert fake.asked["stop_token_ids"] == [2]
    assert (fake.asked["temperature"], fake.asked["top_p"], fake.asked["max_tokens"]) == (0.7, 0.9, 8)


def test_decoding_steps_are_recorded_and_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeVllm(monkeypatch)
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    settings = VllmSettings(Path("m"), "bfloat16", 16, 64, 512, 0.3, enforce_eager=False, seed=1)
    assert module._start(settings, "raw_logprobs", False) is fake
    assert fake.made["compilation_config"]["mode"] == 0
    assert fake.made["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert fake.made["enforce_eager"] is False
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    """Two adapters over the shipped model that do different things."""
    model = asset("quickstart/model")
    return [some_policy(Path(model), rank) for rank in (4, 8)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    codec = load_codec(Path(asset("quickstart/model")))
    texts = ("where is the lamp?", "Chunk: Day 2 : the lamp is in the hall", "Memory:")
    return [list(codec.encode_plain(text)) for text in texts]


@pytest.fixture
def played(
    policies: list[Policy], prompts: list[list[int]], tmp_path: Path, require: Callable[[str, str | None], None]
) -> Any:
    python = Path(os.environ.get("POIMEN_VLLM_PYTHON") or Path.home() / ".cache" / "poimen-vllm" / "bin" / "python")
    require("vllm", None if python.is_file() else f"no {python}; build it with .ci/vllm-env.sh")
    for number, policy in enumerate(policies):
        policy.model.save_pretrained(tmp_path / f"adapter{number}")
    model = Path(asset("quickstart/model"))
    job = {
        "model": str(model),
        "adapters": [str(tmp_path / "adapter0"), str(tmp_path / "adapter1")],
        "prompts": prompts,
        "stop_ids": list(load_codec(model).stop_ids),
        "max_tokens": MAX_TOKENS,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    side = Path(__file__).with_name("vllm_side.py")
    arguments = [str(python), str(side), str(tmp_path / "job.json"), str(tmp_path / "out.json")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.vllm
@pytest.mark.slow
def test_each_adapter_that_is_handed_over_is_the_one_that_samples(
    played: Any, policies: list[Policy], prompts: list[list[int]]
) -> None:
    stop = load_codec(Path(asset("quickstart/model"))).stop_ids
    for number, policy in enumerate(policies):
        for prompt, (ids, log_probs, clipped) in zip(prompts, played[f"greedy {number}"], strict=True):
            assert_log_probs(policy, prompt, ids, log_probs)
            assert clipped == (ids[-1] not in stop)
            assert len(ids) == MAX_TOKENS or not clipped
    assert played["greedy 0"] != played["greedy 1"]
    for prompt, (ids, log_probs, _) in zip(prompts, played["sampled"], strict=True):
        assert_log_probs(policies[1], prompt, ids, log_probs)  # before top-p, at temperature 1
    assert [ids for ids, _, _ in played["again"]] == [ids for ids, _, _ in played["sampled"]]
    turns = {key: [item for place, item in played["turns"] if place == key] for key in (0, 1)}
    for key, (first, second) in turns.items():
        assert first[0] == played["greedy 1"][key][0]
        assert_log_probs(policies[1], [*prompts[key], *first[0]], second[0], second[1])


def assert_log_probs(policy: Policy, prompt: list[int], ids: list[int], log_probs: list[float]) -> None:
    with torch.no_grad():
        expected = plain_log_probs(policy.model, row(prompt, 0, ids), temperature=1.0)
    assert log_probs == pytest.approx(expected.tolist(), abs=1e-3)
