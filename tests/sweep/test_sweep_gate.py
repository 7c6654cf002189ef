"""The real program in front of the real gate check: a fault in what training calls stops the sweep before it exists."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from poimen_exp import app
from poimen_exp.__main__ import main
from poimen_exp.gates import advantages, rewards, scoring
from poimen_exp.gates.check_step import import_engines


def _flipped_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "UPDATE_MATCH", -1.0)
    monkeypatch.setattr(rewards, "UPDATE_MISMATCH", 1.0)


def _flipped_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    real = advantages.mix_advantages

    def mix(trajectory: Tensor, turn: Tensor, alpha: float) -> Tensor:
        return real(turn, trajectory, alpha)

    for module in (advantages, scoring):
        monkeypatch.setattr(module, "mix_advantages", mix)


def _whole_batch_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    real = advantages.trajectory_advantages

    def whole(values: Tensor, group: Tensor) -> Tensor:
        return real(values, group * 0)

    for module in (advantages, scoring):
        monkeypatch.setattr(module, "trajectory_advantages", whole)


@pytest.mark.parametrize("fault", [_flipped_update, _flipped_mix, _whole_batch_baseline])
def test_a_sweep_with_a_fault_in_the_core_exits_2_and_leaves_its_report_only(
    fault: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():  # of verl's imports
        warnings.simplefilter("ignore")
        import_engines()
    fault(monkeypatch)
    monkeypatch.chdir(tmp_path)
    app._checked.cache_clear()  # another test may have had its answer for this configuration
    assert main(["--multirun", "+experiment=quickstart", "alpha=0.9,1.0"]) == 2
    assert "gate check: " in capsys.readouterr().err
    [report] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert report.match("multirun/refused/*/gate_check.json")
    assert json.loads(report.read_text())["passed"] is False


def test_a_sweep_whose_trials_never_validate_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--multirun", "+experiment=quickstart", "alpha=0.9,1.0", "trainer.test_freq=-1"]) == 2
    assert "trainer.test_freq: got -1, expected 1 or more" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
