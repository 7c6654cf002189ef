"""``result.json``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poimen_exp.errors import RunFailed
from poimen_exp.tracking.result import RunResult, read_result, write_result


def test_result_json_has_the_shape_of_the_contract(tmp_path: Path) -> None:
    result = RunResult("converged", objective_value=1.25, step=20, best_step=12, adapter=tmp_path / "adapter")
    write_result(tmp_path / "result.json", result)
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "status": "converged",
        "objective": {"name": "val/reward/total", "value": 1.25},
        "step": 20,
        "best_step": 12,
        "adapter": "adapter",
    }
    assert read_result(tmp_path / "result.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_run_that_failed_before_its_first_validation_has_no_objective(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", RunResult("failed"))
    data = json.loads((tmp_path / "result.json").read_text())
    assert data["objective"]["value"] is None
    assert data["adapter"] is None
    assert read_result(tmp_path / "result.json") == RunResult("failed")


def test_a_run_without_result_json_did_not_finish(tmp_path: Path) -> None:
    assert read_result(tmp_path / "result.json") is None


def test_an_objective_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(RunFailed, match="val/reward/total: got nan"):
        RunResult("completed", objective_value=float("nan"))


def test_a_status_outside_the_contract_is_refused() -> None:
    with pytest.raises(RunFailed, match="'done', expected one of converged, completed"):
        RunResult("done")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ['{"status": "completed"', '{"status": "completed"}', "[]"])
def test_a_damaged_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(RunFailed, match=r"result\.json: damaged"):
        read_result(tmp_path / "result.json")
