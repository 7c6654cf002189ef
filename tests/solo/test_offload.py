"""Roles that take turns on the device: who comes for which phase, and that nothing else changes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from poimen_exp import app
from poimen_exp.config.compose import compose_config
from poimen_exp.gates.types import Prompt, Sampling
from poimen_exp.solo import dry, estimate_inputs, offload, run
from poimen_exp.solo.engine import Request, TransformersEngine
from poimen_exp.solo.engines import VisitingEngine
from poimen_exp.solo.estimate_types import Workload
from poimen_exp.solo.loop import Loop
from poimen_exp.solo.prompt_setup import prompt_setup
from poimen_exp.solo.run import build_loop, extended
from poimen_exp.solo.seeds import stream
from poimen_exp.solo.settings import FULL_OFFLOAD, NO_OFFLOAD, SoloSettings
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.settings import TrackingSettings
from poimen_exp.tracking.tracker import Tracker

from . import prompt_support
from .prompt_support import small_settings
from .support import CPU, PAD, policy

GPU = torch.device("cuda")
OFFLOADS = (
    "actor_rollout_ref.actor.fsdp_config.param_offload=true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    "actor_rollout_ref.ref.fsdp_config.param_offload=true",
    "critic.fsdp.param_offload=true",
    "critic.fsdp.optimizer_offload=true",
)
_CHECKPOINT = (
    "adapter.safetensors",
    "optimizer.pt",
    "reference.safetensors",
    "critic.safetensors",
    "critic_optimizer.pt",
)


def fail(*_: object) -> None:
    raise IndexError


def ppo(*overrides: str) -> SoloSettings:
    """Three steps of actor and critic."""
    lines = ("trainer.critic_warmup=0", "trainer.total_training_steps=3", "trainer.test_freq=0", *overrides)
    return small_settings("ppo", *lines)


@contextmanager
def loop_of(settings: SoloSettings, folder: Path) -> Iterator[Loop]:
    with RunFolder.create(folder) as opened, Tracker(opened, TrackingSettings(wandb="disabled"), {}) as tracker:
        yield build_loop(settings, prompt_setup(settings), tracker, lambda _: None, None)


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move gives every weight and moment another storage, as one to a GPU does; what is left behind is spoilt."""
    to, move_state = torch.nn.Module.to, offload.move_state

    def move(self: torch.nn.Module, *where: Any, **more: Any) -> torch.nn.Module:
        left = [value.data for value in self.parameters()]
        to(self, *where, **more)._apply(torch.clone)
        spoil(left)
        return self

    def move_moments(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        move_state(optimizer, device)
        for kept in optimizer.state.values():
            left = [kept["exp_avg"], kept["exp_avg_sq"]]
            kept |= {name: kept[name].clone() for name in ("exp_avg", "exp_avg_sq")}
            spoil(left)

    def spoil(left: list[Tensor]) -> None:
        for value in left:
            value.fill_(torch.nan)

    monkeypatch.setattr(torch.nn.Module, "to", move)
    monkeypatch.setattr(offload, "move_state", move_moments)


def test_verls_keys_offload() -> None:
    assert ppo().offload == NO_OFFLOAD
    assert ppo(*OFFLOADS).offload == FULL_OFFLOAD


def test_a_model_comes_for_a_phase_and_goes_after_it_also_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves are recorded and not made: there may be no GPU."""
    model = torch.nn.Linear(2, 1)
    moves: list[str] = []
    monkeypatch.setattr(model, "to", lambda device: moves.append(torch.device(device).type))
    with offload.model_on_device(model, GPU, moves=False):
        assert moves == []
    with offload.model_on_device(model, GPU, moves=True):
        assert moves == ["cuda"]
        model(torch.ones(2)).sum().backward()
    assert moves == ["cuda", "cpu"]
    assert model.weight.grad is None  # dropped, not carried
    with pytest.raises(IndexError), offload.model_on_device(model, GPU, moves=True):
        raise IndexError
    assert moves == ["cuda", "cpu", "cuda", "cpu"]


def test_a_move_that_fails_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    moves: list[str] = []

    def to(device: torch.device | str) -> None:
        moves.append(torch.device(device).type)
        if torch.device(device) == GPU:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(model, "to", to)
    with pytest.raises(torch.OutOfMemoryError), offload.model_on_device(model, GPU, moves=True):
        pass
    assert moves == ["cuda", "cpu"]


def test_moments_move_and_step_counts_stay() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    offload.move_state(optimizer, torch.device("meta"))
    kept = optimizer.state[weight]
    places = {name: value.device.type for name, value in kept.items()}
    assert places == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_optimizer_state_goes_after_a_phase_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[str] = []
    monkeypatch.setattr(offload, "move_state", lambda _, device: moves.append(device.type))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(IndexError), offload.state_on_device(optimizer, GPU, moves=True):
        raise IndexError
    with offload.state_on_device(optimizer, GPU, moves=False):
        pass
    assert moves == ["cuda", "cpu"]


def record(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Moves of a loop's roles, in order; every visit is two."""
    assert loop.critic is not None
    moves: list[str] = []
    optimizers = {id(loop.updater.optimizer): "actor's optimizer", id(loop.critic.optimizer): "critic's optimizer"}
    for name, model in (("sampler", loop.policy.sampler), ("actor", loop.policy.model), ("critic", loop.critic.model)):
        monkeypatch.setattr(model, "to", lambda _, name=name: moves.append(name))
    monkeypatch.setattr(offload, "move_state", lambda optimizer, _: moves.append(optimizers[id(optimizer)]))
    return moves


def test_roles_take_turns_in_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with loop_of(ppo(*OFFLOADS, "trainer.val_before_train=false"), tmp_path / "r") as loop:
        moves = record(loop, monkeypatch)
        loop._step()
    expected = [
        ("sampler", "sampler"),  # rollouts
        ("actor", "actor"),  # old and reference log-probs
        ("critic", "critic"),  # values
        ("critic", "critic's optimizer", "critic's optimizer", "critic"),
        ("actor", "actor's optimizer", "actor's optimizer", "actor"),  # update, and the sampler's new weights
    ]
    assert moves == [name for visit in expected for name in visit]


def test_nothing_moves_where_nothing_is_offloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with loop_of(ppo(), tmp_path / "r") as loop:
        moves = record(loop, monkeypatch)
        loop._step()
    assert moves == []


def test_roles_leave_when_an_update_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with loop_of(ppo(*OFFLOADS), tmp_path / "r") as loop:
        moves = record(loop, monkeypatch)
        monkeypatch.setattr(loop.updater, "update", fail)
        with pytest.raises(IndexError):
            loop._step()
    assert moves[-4:] == ["actor", "actor's optimizer", "actor's optimizer", "actor"]


def test_a_visiting_sampler_gives_what_one_that_stays_gives_and_leaves_when_it_fails(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = policy(tiny_folder).sampler

    def make() -> TransformersEngine:
        return TransformersEngine(sampler, (2,), PAD, 2)

    asked = [Request(Prompt((10, 11, 12, place), 2), Sampling(1.0, 1.0, -1, 6)) for place in range(5)]
    moves: list[str] = []
    monkeypatch.setattr(sampler, "to", lambda device: moves.append(str(device)))
    visiting, staying = VisitingEngine(sampler, CPU, make), make()
    for step in range(2):  # the second time slots are there that the visitor has to make anew
        got = visiting.generate(asked, stream(0, "a", step))
        assert got == staying.generate(asked, stream(0, "a", step))

    with pytest.raises(IndexError):
        visiting.serve(dict(enumerate(asked)), fail, stream(0, "a"))
    assert len(moves) == 6


@pytest.mark.usefixtures("moving")
def test_an_offloaded_run_and_its_resume_leave_the_bytes_of_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = ppo(*OFFLOADS)
    prompt_support.run(extended(settings, 1), tmp_path / "offloaded")
    prompt_support.run(settings, tmp_path / "offloaded", resume=True)
    monkeypatch.undo()
    prompt_support.run(replace(settings, offload=NO_OFFLOAD), tmp_path / "plain")
    for name in _CHECKPOINT:
        file = Path("checkpoints/global_step_3") / name
        assert (tmp_path / "offloaded" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes(), name
    file = Path("trajectories/step_3.jsonl")
    assert (tmp_path / "offloaded" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    first, last = (tmp_path / f"plain/checkpoints/global_step_{step}/critic.safetensors" for step in (2, 3))
    assert first.read_bytes() != last.read_bytes()  # without that, equal bytes would say nothing


# --- when memory asks for it --------------------------------------------------------------------------------------


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``short_of_memory(bytes)``: a GPU of that size, as the estimate sees it."""

    def limit(device_bytes: int) -> None:
        def on_device(work: Workload, *_: object) -> Workload:
            return replace(work, device_bytes=device_bytes)

        monkeypatch.setattr(estimate_inputs, "on_device", on_device)

    return limit


def test_a_run_offloads_where_the_device_is_too_small_for_it_as_it_is(short_of_memory: Callable[[int], None]) -> None:
    settings = ppo()
    setup = prompt_setup(settings)
    on_cpu = dry.cost(settings, setup)
    assert on_cpu.settings == settings
    assert on_cpu.told[2:] == []
    without = on_cpu.estimate["memory"]["peak"]
    short_of_memory(without - 1)
    found = dry.cost(settings, setup)
    assert found.settings == replace(settings, offload=FULL_OFFLOAD)
    assert all(found.estimate["offload"].values())
    assert found.estimate["memory"]["peak"] < without
    assert found.told[2:] == ["offload: all roles, as memory asks for it: the peak would be above what this GPU has"]
    assert dry.cost(found.settings, setup).told[2:] == []  # it was asked for


def test_what_the_estimate_decided_is_what_trains_and_what_the_plan_says(
    short_of_memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cfg = compose_config(["+experiment=quickstart", "device=cpu", "tracking.wandb=disabled"])
    run_settings = app.check(cfg).solo
    assert run_settings is not None
    short_of_memory(dry.cost(run_settings.settings, run_settings.setup).estimate["memory"]["peak"] - 1)
    trained: list[SoloSettings] = []

    def stop(settings: SoloSettings, *_: object) -> None:
        trained.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_solo", stop)
    with pytest.raises(KeyboardInterrupt):
        app.run_in(cfg, tmp_path / "r")
    assert [settings.offload for settings in trained] == [FULL_OFFLOAD]
    assert '"critic_optimizer": true' in (tmp_path / "r/plan.json").read_text()


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_offloaded_roles_hold_no_memory_between_phases_and_learn_the_same(
    require: Callable[[str, str | None], None], tmp_path: Path
) -> None:
    require("gpu", None if torch.cuda.is_available() else "torch sees none")
    held, states = [], []
    for settings in (ppo("device=cuda"), ppo("device=cuda", *OFFLOADS)):
        before = allocated()
        with ExitStack() as stack:
            loop = stack.enter_context(loop_of(settings, tmp_path / f"r{len(held)}"))
            assert loop.critic is not None
            loop._step()
            held.append(allocated() - before)
            states.append(loop.policy.state() | loop.critic.state())
            optimizers = [loop.updater.optimizer, loop.critic.optimizer]
            moments = [kept["exp_avg"] for optimizer in optimizers for kept in optimizer.state.values()]
            places = {value.device.type for value in (*states[-1].values(), *moments)}
            assert places == {"cpu" if settings.offload == FULL_OFFLOAD else "cuda"}
        del loop, optimizers, moments
    plain, offloaded = states
    assert plain.keys() == offloaded.keys()
    for name, value in plain.items():  # moved by about 1e-3; Adam turns rounding of a gradient near 0 into a whole step
        assert float((value.cpu() - offloaded[name]).abs().mean()) < 1e-4, name
    assert held[1] < held[0] / 10


def allocated() -> int:
    """Bytes of tensors on the GPU, without the work spaces that its libraries keep."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
