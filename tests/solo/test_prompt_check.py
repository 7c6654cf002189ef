"""The check in front of a run of prompts: it passes as the code is, and one-line faults do not pass."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from faulty_package import copy_with, package_at

from poimen_exp.solo.check import check_learning
from poimen_exp.solo.settings import SoloSettings

from .prompt_support import EXPERIMENTS, small_settings


@pytest.fixture(scope="module")
def settings() -> dict[str, SoloSettings]:
    return {name: small_settings(name) for name in EXPERIMENTS}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_packaged_experiment_passes(settings: dict[str, SoloSettings], experiment: str) -> None:
    report = check_learning(settings[experiment])
    assert [check.line() for check in report.failed] == []
    assert len(report.checks) > 20
    sections = {check.name.split("/")[0] for check in report.checks}
    assert sections >= {"estimator", "loss", "log_probs", "step", "learning"}
    assert ("critic" in sections) == (experiment == "ppo")


def test_a_loss_that_punishes_what_was_rewarded_does_not_pass(settings: dict[str, SoloSettings]) -> None:
    """An entropy bonus far above the reward pushes the likely token down, whatever was rewarded."""
    chosen = settings["grpo"]
    report = check_learning(replace(chosen, loss=replace(chosen.loss, entropy_coeff=1e4)))
    assert not report.passed
    assert any("the run's loss" in check.name for check in report.failed)


@dataclass(frozen=True)
class Fault:
    """A replacement in one file of ``solo``; ``part`` begins the name of a check that must fail there."""

    name: str
    experiment: str
    file: str
    old: str
    new: str
    part: str


FAULTS = (
    Fault(
        "sign", "grpo", "estimators.py", "unpadded(advantages, mask),", "unpadded(-advantages, mask),", "estimator/grpo"
    ),
    Fault(
        "score on the first token",
        "reinforce_plus_plus",
        "estimators.py",
        "row[-1] = score",
        "row[0] = score",
        "estimator/reinforce",
    ),
    Fault(
        "mask shifted by one",
        "grpo",
        "ragged.py",
        "[None] < lengths[:, None]",
        "[None] < lengths[:, None] - 1",
        "estimator/runs",
    ),
    Fault(
        "gamma ignored",
        "reinforce_plus_plus",
        "estimators.py",
        "AlgoConfig(gamma=settings.gamma)",
        "AlgoConfig(gamma=1.0)",
        "estimator/reinforce",
    ),
    Fault("gamma of gae ignored", "ppo", "estimators.py", "gamma=settings.gamma,", "gamma=1.0,", "estimator/gae"),
    Fault("lambda ignored", "ppo", "estimators.py", "lam=settings.lam,", "lam=1.0,", "estimator/gae"),
    Fault(
        "values of other rows",
        "ppo",
        "estimators.py",
        "else padded(values)[0]",
        "else padded(values)[0].flip(0)",
        "estimator/gae",
    ),
    Fault(
        "returns in place of whitened advantages",
        "reinforce_plus_plus",
        "estimators.py",
        "config=AlgoConfig(gamma=settings.gamma)\n    )",
        "config=AlgoConfig(gamma=settings.gamma)\n    )[1:] * 2",
        "estimator/reinforce",
    ),
    Fault(
        "mean over the whole batch",
        "dr_grpo",
        "estimators.py",
        "group.numpy(),",
        "group.numpy() * 0,",
        "estimator/dr_grpo",
    ),
    Fault(
        "others of the whole batch", "rloo", "estimators.py", "group.numpy(),", "group.numpy() * 0,", "estimator/rloo"
    ),
    Fault(
        "std of grpo kept",
        "dr_grpo",
        "estimators.py",
        "norm_adv_by_std_in_grpo=settings.norm_adv_by_std_in_grpo",
        "norm_adv_by_std_in_grpo=True",
        "estimator/dr_grpo",
    ),
    Fault(
        "kl added to the reward",
        "rloo",
        "estimators.py",
        "row - coefficient * kl",
        "row + coefficient * kl",
        "estimator/kl",
    ),
    Fault(
        "value loss not clipped",
        "ppo",
        "critic.py",
        "cliprange_value=settings.cliprange_value",
        "cliprange_value=1e9",
        "critic/clipped",
    ),
    Fault(
        "padding in the value loss",
        "ppo",
        "critic.py",
        "response_mask=batch.mask.float()",
        "response_mask=batch.mask.float() * 0 + 1",
        "critic/clipped",
    ),
    Fault(
        "advantages of other rows",
        "grpo",
        "update.py",
        "at(batch.advantages, places,",
        "at(batch.advantages, places[::-1],",
        "learning/",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_fault_does_not_pass(fault: Fault, settings: dict[str, SoloSettings], tmp_path: Path) -> None:
    with package_at(copy_with(tmp_path, f"solo/{fault.file}", fault.old, fault.new)):
        report = importlib.import_module("poimen_exp.solo.check").check_learning(settings[fault.experiment])
    assert fault.part in [found.name[: len(fault.part)] for found in report.failed], report.failed
