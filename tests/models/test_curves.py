from __future__ import annotations

import json
from pathlib import Path

import pytest

from poimen_exp.errors import Refused
from poimen_exp.evaluation.curves import write_curves

PRESENT = "train/gates/update_accuracy/evidence_present"


def _run(folder: Path) -> Path:
    lines = [
        {"step": 0, "time_s": 2.0, "metrics": {"val/reward/total": -0.5}, "counts": {"val/reward/total": 4}},
        *(
            {
                "step": step,
                "time_s": 2.0 + 10 * step,
                "metrics": {PRESENT: 0.25 * step, "perf/throughput": 12345.6, "timing_s/gen": 2.0},
                "counts": {PRESENT: 8},
            }
            for step in (1, 2, 3)
        ),
        {"step": 3, "time_s": 34.0, "metrics": {"val/reward/total": 1.5}, "counts": {"val/reward/total": 4}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_table_has_first_last_and_validated_steps_and_the_mean_of_all(tmp_path: Path) -> None:
    write_curves(_run(tmp_path), tmp_path / "out" / "curves.png", tmp_path / "out" / "curves.md")
    text = (tmp_path / "out" / "curves.md").read_text()
    rows = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in text.splitlines()[2:]}
    assert text.startswith("3 steps in 34 s")
    assert rows["metric"] == ["step 0", "step 1", "step 3", "mean of all steps"]
    assert rows[f"`{PRESENT}`"] == ["", "0.250", "0.750", "0.500"]  # step 2's 0.5 counts in the mean
    assert rows["`val/reward/total`"] == ["-0.500", "", "1.500", "0.500"]
    assert rows["`perf/throughput`"] == ["", "12,346", "12,346", "12,346"]
    assert "`train/gates/exit/exact`" not in rows  # never measured
    png = (tmp_path / "out" / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000


def test_a_folder_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no metrics\.jsonl with a finished step"):
        write_curves(tmp_path, tmp_path / "curves.png", tmp_path / "curves.md")
