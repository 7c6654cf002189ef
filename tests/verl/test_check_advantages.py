"""What scripts/check_advantages.py says of a run's rollouts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from verl_samples import scored

from poimen_exp.gates.scoring import advantages_of
from poimen_exp.solo.gate_task import rollout_records
from poimen_exp.tracking.trajectories import write_trajectories

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_advantages.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_advantages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of one group of three readings of unequal lengths."""
    gates: tuple[tuple[bool | None, ...], ...] = ((True,), (False, True), (True, None, False))
    readings = [scored(updates, "yes" if place else "no", sample=place) for place, updates in enumerate(gates)]
    for step in (1, 2):
        records = rollout_records(readings, advantages_of(readings, 0.9, "group_step")[1], step)
        write_trajectories(tmp_path / "trajectories" / f"step_{step}.jsonl", records)
    (tmp_path / "resolved.yaml").write_text("alpha: 0.9\nadvantage: {turn_baseline: group_step}\n")
    return tmp_path


def test_what_was_trained_with_follows_from_the_rewards(
    script: ModuleType, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(run) == 0
    assert capsys.readouterr().out == f"{run}: 18 turns of 2 steps, largest difference 0\n"


@pytest.mark.parametrize("other", ["1", "null,"])
def test_other_advantages_are_found(script: ModuleType, run: Path, other: str) -> None:
    file = run / "trajectories" / "step_1.jsonl"
    text = file.read_text()
    end = text.index('"advantage":') + len('"advantage":')
    rest = text[end:] if other == "1" else text[text.index(",", end) + 1 :]
    file.write_text(text[:end] + other + rest)
    assert script.main(run) == 1


def test_another_alpha_is_found(script: ModuleType, run: Path) -> None:
    (run / "resolved.yaml").write_text("alpha: 1.0\nadvantage: {turn_baseline: group_step}\n")
    assert script.main(run) == 1


def test_a_run_without_rollouts_is_not_found_right(script: ModuleType, run: Path) -> None:
    for file in (run / "trajectories").glob("step_*.jsonl"):
        file.unlink()
    assert script.main(run) == 1
