"""Every one-line fault that stops a run stops a sweep too: no trial, no study, no database, only the report."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
from faulty_package import copy_with, package_at
from omegaconf import DictConfig, open_dict
from test_mutations import FAULTS, Fault

from poimen_exp.config.compose import compose_config
from poimen_exp.gates.check_step import import_engines

pytestmark = pytest.mark.slow

SEEN = [fault for fault in FAULTS if fault.name != "worst accepted answer"]
"""The quickstart's tasks have one accepted answer each: the worst one is the best one there."""


@pytest.fixture(scope="module")
def trials() -> list[DictConfig]:
    """What a sweep of one trial would run."""
    with warnings.catch_warnings():  # of verl's imports
        warnings.simplefilter("ignore")
        import_engines()
    config = compose_config(["+experiment=quickstart"])
    with open_dict(config):
        config.hydra = {}  # the node that Hydra adds; the check takes it off
    return [config]


def check_before_sweep(trials: list[DictConfig]) -> Any:
    importlib.import_module("poimen_exp.app")._checked.cache_clear()
    return importlib.import_module("poimen_exp.sweep.gate").check_before_sweep(trials)


def test_a_sweep_without_a_fault_is_let_through(
    trials: list[DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with package_at(copy_with(tmp_path / "package")):
        check_before_sweep(trials)
    assert not (tmp_path / "multirun").exists()


@pytest.mark.parametrize("fault", SEEN, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_sweep_with_a_fault_is_refused(
    fault: Fault, trials: list[DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with package_at(copy_with(tmp_path / "package", fault.file, fault.old, fault.new)):
        refused = importlib.import_module("poimen_exp.errors").Refused
        with pytest.raises(refused, match="gate check: ") as refusal:
            check_before_sweep(trials)
    assert refusal.value.exit_code == 2
    left = [path for path in (tmp_path / "multirun").rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["gate_check.json"]
