"""What came before the first step stands in the first record, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from poimen_exp.tracking.metrics_log import MetricLine, read_metrics

from .run_support import run, small_corpus, small_settings, small_setup

WARM = ("gates.warm_start.steps=2", "gates.warm_start.batch=4", "trainer.total_training_steps=2")
NAMES = {
    "warm_start/loss/first",
    "warm_start/loss/last",
    "warm_start/skipped",
    *(
        f"warm_start/verdict/{side}/{kind}"
        for side in ("train", "val")
        for kind in ("evidence_present", "evidence_free")
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("opening") / "c")


def lines(corpus: Path, folder: Path, *overrides: str) -> list[MetricLine]:
    run(small_settings(corpus, *WARM, *overrides), folder)
    return list(read_metrics(folder / "metrics.jsonl").lines)


def about_the_start(line: MetricLine) -> set[str]:
    return {name for name in line.metrics if name.startswith("warm_start/")}


def test_the_warm_start_stands_beside_the_first_validation(corpus: Path, tmp_path: Path) -> None:
    first, *later = lines(corpus, tmp_path / "r")
    assert first.step == 0
    assert about_the_start(first) == NAMES
    assert first.metrics["timing_s/warm_start"] > 0.0
    assert first.metrics["warm_start/skipped"] == 0.0
    tasks = small_setup(small_settings(corpus, *WARM)).corpus
    for side in ("train", "val"):
        names = [f"warm_start/verdict/{side}/{kind}" for kind in ("evidence_present", "evidence_free")]
        assert all(0.0 <= first.metrics[name] <= 1.0 for name in names)
        labels = [label for task in tasks.split(side) for label in task.evidence]
        counts = [first.counts[name] for name in names]
        if side == "val":
            assert counts == [labels.count(True), labels.count(False)]
        else:  # as many tasks as validation has
            assert 0 < counts[0] < labels.count(True)
            assert 0 < counts[1] < labels.count(False)
    assert not any(about_the_start(line) for line in later)


def test_without_that_validation_it_stands_in_the_first_step(corpus: Path, tmp_path: Path) -> None:
    first, second = lines(corpus, tmp_path / "r", "trainer.val_before_train=false")
    assert (first.step, second.step) == (1, 2)
    assert about_the_start(first) == NAMES
    assert not about_the_start(second)
