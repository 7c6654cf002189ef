"""The names of metrics are a contract."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from poimen_exp.errors import RunFailed
from poimen_exp.tracking.metric_names import METRICS, check_names, gate_names

ROOT = Path(__file__).parents[2]


def test_the_names_are_those_of_the_golden_file() -> None:
    golden = Path(__file__).with_name("metric_names.txt").read_text().split()
    assert sorted(gate_names()) == golden


def test_every_name_that_the_gates_compute_is_registered() -> None:
    from poimen_exp.gates.metrics import ADVANTAGE_METRICS, GATE_METRICS

    check_names([f"{side}/{name}" for side in ("train", "val") for name in GATE_METRICS])
    check_names(ADVANTAGE_METRICS)


def test_the_documentation_has_the_same_table() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    table = text.split("|---|---|---|---|\n")[1].split("\n<!-- end of table")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()]
    sides = {"both": "both", "train_only": "train"}
    assert rows == [(f"`{m.name}`", sides[m.side], m.per or "(a count)", m.meaning) for m in METRICS]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("train/gates/exit/exakt", "train/gates/exit/exact"),
        ("gates/exit/exact", "train/gates/exit/exact"),
        ("val/rewards/total", "val/reward/total"),
        ("train/advantage/singletons", "advantage/singletons"),
        ("update/skiped", "update/skipped"),
    ],
)
def test_a_misspelt_gate_metric_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(RunFailed, match=re.escape(f"metric {name!r}: not a known name (did you mean {near!r}?)")):
        check_names([name])


@pytest.mark.parametrize("name", ["actr/pg_loss", "loss", "train/loss", "rollout/other", "actor/", "actor//x"])
def test_other_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(RunFailed, match="not a known name"):
        check_names([name])


def test_names_of_verl_pass() -> None:
    check_names(
        [
            "actor/pg_loss",
            "timing_s/gen",
            "critic/rewards/mean",
            "perf/max_memory_allocated_gb",
            "response_length/mean",
            "val-core/poimen/reward/mean@1",
            "training/global_step",
            "rollout/moe/routed_experts_found",
            "warm_start/loss",
        ]
    )
