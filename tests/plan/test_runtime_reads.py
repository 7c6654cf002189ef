"""Every setting is read by the code that trains: real runs of one step whose settings note who asks for what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import poimen_exp
from poimen_exp.solo.dry import loaded_setup
from poimen_exp.solo.plan import compile_settings, nested_settings
from poimen_exp.solo.run import run_solo
from poimen_exp.solo.settings import SoloSettings
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.settings import TrackingSettings
from poimen_exp.tracking.tracker import Tracker

from .bases import base

pytestmark = pytest.mark.slow

RUNS = {
    "gates": (
        "gates.warm_start.steps=1",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    ),
    "prompts": (),
    "gae": ("critic.optim.lr_scheduler_type=cosine",),
}
# What a file reads that none of these runs needs: a classifier on disk, another run to begin with, another reference, a
# GPU with vLLM, a collapse, a task that does not fit.
IN_FILES = {
    "reward.model_path": "solo/prompt_setup.py",
    "reward.model_dtype": "solo/reward_model.py",
    "reward.model_batch_tokens": "solo/reward_model.py",
    "trainer.resume_from": "solo/run.py",
    "reference": "solo/run.py",
    "rollout.memory_share": "solo/engines.py",
    "rollout.enforce_eager": "solo/engines.py",
    "trainer.on_collapse": "solo/loop.py",
    "corpus.on_too_long": "corpus/loader.py",
}


def leaf_fields(kind: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        nested = nested_settings(hint)
        if nested is None:
            yield f"{prefix}{name}"
        else:
            yield from leaf_fields(nested, f"{prefix}{name}.")


def noting(settings: Any, seen: set[str], prefix: str = "") -> Any:
    """A copy of a settings dataclass that adds the dotted path of every field it is asked for to ``seen``.

    Comparing, hashing and printing it are no reading: generated methods ask for all fields.
    """
    names = {field.name for field in fields(settings)}

    class Noting(type(settings)):  # type: ignore[misc]
        __eq__, __hash__ = object.__eq__, object.__hash__

        def __repr__(self) -> str:
            return repr(settings)

        def __getattribute__(self, name: str) -> Any:
            if name in names:
                seen.add(f"{prefix}{name}")
            return object.__getattribute__(self, name)

    copy = object.__new__(Noting)
    for name in names:
        value = getattr(settings, name)
        inner = noting(value, seen, f"{prefix}{name}.") if is_dataclass(value) else value
        object.__setattr__(copy, name, inner)
    return copy


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Paths that one-step runs of the gates, of prompts and of gae asked for."""
    found: set[str] = set()
    for kind, more in RUNS.items():
        folder = tmp_path_factory.mktemp(kind)
        settings, _ = compile_settings(base(kind, folder, more))
        noted = noting(settings, found)
        opened = RunFolder.create(folder / "run")
        with opened, Tracker(opened, TrackingSettings(wandb="disabled"), {}) as tracker:
            result = run_solo(noted, loaded_setup(noted), tracker, lambda _: None)
        assert result.step == 1
    return found


def test_every_setting_is_asked_for_by_a_run_or_by_the_file_that_needs_it(seen: set[str]) -> None:
    assert [path for path in leaf_fields(SoloSettings) if path not in seen | IN_FILES.keys()] == []


@pytest.mark.parametrize("path", IN_FILES)
def test_a_setting_of_rarer_runs_is_read_where_it_is_said(path: str) -> None:
    tree = ast.parse((Path(poimen_exp.__file__).parent / IN_FILES[path]).read_text())
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    assert path.rpartition(".")[2] in read


def test_a_setting_that_nobody_asks_for_is_noticed() -> None:
    settings, _ = compile_settings(base("gates", Path()))
    found: set[str] = set()
    noted = noting(settings, found)
    assert (repr(noted), hash(noted) == hash(noted), found) == (repr(settings), True, set())
    assert noted.loss.clip_ratio == 0.2
    assert found == {"loss", "loss.clip_ratio"}
