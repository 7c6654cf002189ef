from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from poimen_exp.config.paths import asset
from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.gates.types import ReadingTask
from poimen_exp.quickstart.logs import Shape, sample_tasks
from poimen_exp.quickstart.model import MEMORY_TOKENS
from poimen_exp.solo.policy import Policy, load_codec
from poimen_exp.solo.settings import ModelSettings
from poimen_exp.solo.verdicts import VerdictAccuracy, verdict_accuracy

MODEL = Path(asset("quickstart/model"))


@pytest.fixture(scope="module")
def shipped() -> Policy:
    settings = ModelSettings(
        path=MODEL,
        lora_rank=1,
        lora_alpha=1,
        target_modules=("q_proj",),
        dtype="float32",
        attn_implementation="sdpa",
        adapter=None,
    )
    return Policy(settings, torch.device("cpu"))


def _accuracy(policy: Policy, tasks: list[ReadingTask], budget: int = 4096) -> VerdictAccuracy:
    codec = load_codec(MODEL)
    protocol = GateProtocol(codec, "chunk_first", "terse", MEMORY_TOKENS)
    return verdict_accuracy(policy, protocol, tasks, codec.pad_id, budget, seed=0)


@pytest.fixture(scope="module")
def tasks() -> list[ReadingTask]:
    return list(islice(sample_tasks(Shape(), random.Random("verdicts")), 12))


def test_the_shipped_model_says_what_it_saw(shipped: Policy, tasks: list[ReadingTask]) -> None:
    found = _accuracy(shipped, tasks)
    labels = [label for task in tasks for label in task.evidence]
    assert (found.with_evidence, found.without) == (sum(map(bool, labels)), labels.count(False))
    assert found.right_with_evidence >= 0.9 * found.with_evidence
    assert found.right_without >= 0.9 * found.without
    assert _accuracy(shipped, tasks, budget=200) == found


def test_labels_upside_down_are_as_often_wrong(shipped: Policy, tasks: list[ReadingTask]) -> None:
    right = _accuracy(shipped, tasks)
    wrong = _accuracy(shipped, [replace(task, evidence=tuple(not label for label in task.evidence)) for task in tasks])
    assert (wrong.without, wrong.with_evidence) == (right.with_evidence, right.without)
    assert wrong.right_without <= 0.1 * wrong.without
    assert wrong.right_with_evidence <= 0.1 * wrong.with_evidence


def test_the_line_has_denominators_and_leaves_out_an_empty_kind() -> None:
    assert VerdictAccuracy(3, 4, 1, 8).line() == "0.75 of 4 with evidence, 0.12 of 8 without evidence"
    assert VerdictAccuracy(0, 0, 1, 8).line() == "0.12 of 8 without evidence"
    assert VerdictAccuracy(0, 0, 0, 0).line() == "no labelled chunk"


def test_what_is_logged_has_the_denominators_of_its_own_kind() -> None:
    present, free = (f"warm_start/verdict/val/{name}" for name in ("evidence_present", "evidence_free"))
    assert VerdictAccuracy(3, 4, 1, 8).metrics("val") == ({present: 0.75, free: 0.125}, {present: 4, free: 8})
    assert VerdictAccuracy(0, 0, 1, 8).metrics("val") == ({free: 0.125}, {free: 8})
