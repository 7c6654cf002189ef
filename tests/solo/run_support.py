"""Small real runs: a few tasks of the shipped corpus, the shipped model, few rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from poimen_exp.config.compose import compose_config
from poimen_exp.corpus import write_corpus
from poimen_exp.solo.plan import compile_settings
from poimen_exp.solo.run import run_solo
from poimen_exp.solo.settings import SoloSettings
from poimen_exp.solo.setup import GateSetup, gate_setup
from poimen_exp.tracking.result import RunResult
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.settings import TrackingSettings
from poimen_exp.tracking.tracker import Tracker

SMALL = (
    "+experiment=quickstart",
    "device=cpu",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=3",
    "trainer.test_freq=3",
    "trainer.save_freq=1",
    "stop=never",
)


def small_corpus(folder: Path, train_tasks: int = 14) -> Path:
    """Two projects: one to validate with four tasks, one to train on. 14 tasks are three batches of four and a rest."""
    settings, _ = compile_settings(compose_config(["+experiment=quickstart"]))
    setup = gate_setup(settings.model, settings.gates, settings.corpus, settings.rollout.max_prompt_length)
    tasks = list(setup.corpus.split("train"))[: train_tasks + 4]

    def records() -> Iterator[dict[str, Any]]:
        for place, task in enumerate(tasks):
            chunks = [
                {"text": f"{text} ({place})", "evidence": label}
                for text, label in zip(task.chunks, task.evidence, strict=True)
            ]
            yield {
                "type": "trajectory",
                "trajectory_id": f"t{place}",
                "project": f"p{int(place >= train_tasks)}",
                "question": task.question,
                "answers": list(task.answers or ()),
                "chunks": chunks,
            }

    write_corpus(folder, records(), corpus_id="small")
    return folder


@lru_cache
def small_settings(corpus: Path, *overrides: str) -> SoloSettings:
    """Settings of a run on ``corpus`` whose larger project trains."""
    settings, _ = compile_settings(compose_config([*SMALL, f"corpus.path={corpus}", *overrides]))
    return replace(settings, corpus=replace(settings.corpus, split_seed=_split_seed(settings)))


def _split_seed(settings: SoloSettings) -> int:
    for seed in range(20):
        candidate = replace(settings, corpus=replace(settings.corpus, split_seed=seed))
        if len(small_setup(candidate).corpus.split("train")) > 4:
            return seed
    raise AssertionError("no split seed trains on the larger project")


def small_setup(settings: SoloSettings) -> GateSetup:
    return gate_setup(settings.model, settings.gates, settings.corpus, settings.rollout.max_prompt_length)


def run(settings: SoloSettings, folder: Path, *, resume: bool = False) -> RunResult:
    """A run of ``settings`` in ``folder``, without W&B."""
    setup = small_setup(settings)
    opened = RunFolder.open(folder, "resume") if resume else RunFolder.create(folder)
    with opened, Tracker(opened, TrackingSettings(wandb="disabled"), {}) as tracker:
        return run_solo(settings, setup, tracker, lambda _: None, resume)
