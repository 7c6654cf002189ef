"""The supervised phase as it runs: what it learns, and what it does with steps that have no number."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from poimen_exp.config.compose import compose_config
from poimen_exp.config.paths import asset
from poimen_exp.errors import RunFailed
from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.gates.types import ReadingTask
from poimen_exp.quickstart.logs import Shape, sample_tasks
from poimen_exp.quickstart.model import MEMORY_TOKENS
from poimen_exp.solo import warm_start as module
from poimen_exp.solo.forward import token_stats
from poimen_exp.solo.plan import compile_settings
from poimen_exp.solo.policy import Policy, load_codec
from poimen_exp.solo.settings import SoloSettings
from poimen_exp.solo.warm_start import WarmStartReport, warm_start

MODEL = Path(asset("quickstart/model"))


@pytest.fixture(scope="module")
def settings() -> SoloSettings:
    found, _ = compile_settings(
        compose_config(["+experiment=quickstart", "gates.warm_start.batch=16", "gates.warm_start.lr=1e-2"])
    )
    return found


@pytest.fixture(scope="module")
def tasks() -> list[ReadingTask]:
    return list(islice(sample_tasks(Shape(), random.Random("warm start")), 6))


class Trained:
    """A warm start of ``steps`` steps and what it said."""

    def __init__(self, settings: SoloSettings, tasks: list[ReadingTask], steps: int) -> None:
        codec = load_codec(MODEL)
        self.policy = Policy(settings.model, torch.device("cpu"))
        self.before = self.policy.state()
        self.sampled = {name: value.clone() for name, value in self.policy.sampler.state_dict().items()}
        self.said: list[str] = []
        protocol = GateProtocol(codec, "chunk_first", "terse", MEMORY_TOKENS)
        gates = replace(settings.gates, warm_start_steps=steps)
        self.report = warm_start(self.policy, protocol, tasks, gates, codec.pad_id, 4096, 1, self.said.append)

    def moved(self) -> bool:
        after = self.policy.state()
        return any(not torch.equal(value, after[name]) for name, value in self.before.items())


class Spoiled:
    """``token_stats`` whose loss, or gradient alone, is not a number in some of the optimizer steps."""

    def __init__(self, *steps: int, gradient: bool = False) -> None:
        self.steps, self.calls, self.own, self.gradient = steps, 0, token_stats, gradient

    def __call__(self, *given: Any) -> Any:
        stats = self.own(*given)
        self.calls += 1
        if self.calls - 1 in self.steps:  # one micro-batch a step here
            if self.gradient:
                spoil: Any = stats.log_probs.register_hook
                spoil(lambda gradient: gradient * float("nan"))
                return stats
            return replace(stats, log_probs=stats.log_probs * float("nan"))
        return stats


def test_it_learns_and_says_its_loss(settings: SoloSettings, tasks: list[ReadingTask]) -> None:
    trained = Trained(settings, tasks, 30)
    assert isinstance(trained.report, WarmStartReport)
    assert 0.0 < trained.report.last_loss < 0.8 * trained.report.first_loss
    assert [line.split(":")[0] for line in trained.said] == [f"warm start {step}/30" for step in (10, 20, 30)]
    assert trained.moved()
    sampler = trained.policy.sampler.state_dict()
    assert any(not torch.equal(value, sampler[name]) for name, value in trained.sampled.items())


def test_the_rate_falls_from_the_first_step_to_almost_nothing(
    settings: SoloSettings, tasks: list[ReadingTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    def step(_: Policy, optimizer: torch.optim.Optimizer, *__: Any) -> tuple[float, bool]:
        rates.extend(group["lr"] for group in optimizer.param_groups)
        return 0.5, True

    monkeypatch.setattr(module, "_supervised_step", step)
    Trained(settings, tasks, 4)
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


@pytest.mark.parametrize("gradient", [False, True])
def test_a_step_without_a_number_is_skipped_and_named(
    settings: SoloSettings, tasks: list[ReadingTask], monkeypatch: pytest.MonkeyPatch, gradient: bool
) -> None:
    monkeypatch.setattr(module, "token_stats", Spoiled(0, 1, gradient=gradient))
    trained = Trained(settings, tasks, 2)
    assert trained.said[:2] == [f"warm start {step}/2: loss or gradient is not finite, step skipped" for step in (1, 2)]
    assert not trained.moved()
    monkeypatch.setattr(module, "token_stats", Spoiled(0, 1, 3, 4, gradient=gradient))  # never three in a row
    trained = Trained(settings, tasks, 6)
    assert trained.moved()
    assert all(bool(torch.isfinite(value).all()) for value in trained.policy.state().values())


def test_three_in_a_row_end_the_run(
    settings: SoloSettings, tasks: list[ReadingTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "token_stats", Spoiled(1, 2, 3))
    with pytest.raises(RunFailed, match="warm start: 3 steps in a row without a finite loss and gradient"):
        Trained(settings, tasks, 8)


def test_no_steps_do_nothing(settings: SoloSettings, tasks: list[ReadingTask]) -> None:
    trained = Trained(settings, tasks, 0)
    assert trained.report is None
    assert not trained.moved()
