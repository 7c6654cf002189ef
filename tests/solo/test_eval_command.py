"""``poimen eval`` as a user types it: the readers side by side on one split of a small corpus."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from poimen_exp.cli import app
from poimen_exp.config.paths import asset
from poimen_exp.errors import Refused
from poimen_exp.evaluation import table
from poimen_exp.evaluation.evaluate import SHOWN, Evaluation, ReaderScores
from poimen_exp.evaluation.intervals import Estimate
from poimen_exp.evaluation.readers import PositionRule, fit_position_rule
from poimen_exp.evaluation.table import print_evaluation
from poimen_exp.gates.types import ReadingTask
from poimen_exp.solo.policy import Policy
from poimen_exp.tracking.metric_names import denominator_of
from poimen_exp.tracking.progress import TABLE_METRICS

from .run_support import small_corpus, small_settings, small_setup

READERS = ["base", "adapter", "oracle gates", "always update", "never update", "position only"]
PRESENT, FREE = (f"gates/update_accuracy/evidence_{kind}" for kind in ("present", "free"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("eval") / "corpus")


@pytest.fixture(scope="module")
def adapter(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder of another rank than the experiment's, whose weights spoil the format."""
    from dataclasses import replace

    settings = small_settings(corpus)
    policy = Policy(replace(settings.model, lora_rank=2), torch.device("cpu"))
    with torch.no_grad():
        for value in policy.trainable().values():
            value.add_(0.05)
    folder = tmp_path_factory.mktemp("adapter")
    policy.model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def framed(corpus: Path) -> Any:
    return evaluate(corpus, "--samples", "3")


def evaluate(corpus: Path, *more: str) -> Any:
    seed = small_settings(corpus).corpus.split_seed
    overrides = ("+experiment=quickstart", f"corpus.path={corpus}", f"corpus.split_seed={seed}", "device=cpu")
    done = CliRunner().invoke(app, ["eval", str(asset("quickstart/model")), *overrides, "--json", *more])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout)


def print_six_readers() -> None:
    counts = {metric: denominator_of(f"val/{metric}") or "" for metric in SHOWN}
    scores = {metric: Estimate(0.123, 0.101, 0.145, 1_234, counts[metric], "projects") for metric in SHOWN}
    readers = tuple(ReaderScores(name, scores, {"a [b] project": scores}, 0) for name in READERS)
    print_evaluation(Evaluation("test", 9, 3, 1, "exact", readers), as_json=False)


def test_a_table_in_a_pipe_is_neither_cut_nor_folded(capsys: pytest.CaptureFixture[str]) -> None:
    print_six_readers()
    said = capsys.readouterr().out
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 120
    of_metrics, by_project = said.split("base, by project")
    for _, label in (pair for pair in TABLE_METRICS if pair[0] in SHOWN):
        assert of_metrics.count(label) == 1
        assert by_project.count(label) == 2  # of base and of adapter
    rows = [re.split("  +", line.strip()) for line in said.splitlines()]
    value = "0.123 [0.101, 0.145] (1,234)"
    assert rows[1:4] == [
        ["reward, mean", "answer right, share"],
        ["n counts", "trajectories", "trajectories"],
        ["base", value, value],
    ]
    assert ["n counts", "chunks", "chunks"] in rows
    assert ["n counts", "turns"] in rows
    assert rows.count(["a [b] project", *["0.123 (1,234)"] * 4]) == 4  # two tables of four metrics, for two readers


@pytest.mark.parametrize("width", [80, 100])
def test_on_a_narrow_terminal_a_row_stays_one_line_with_its_whole_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(table, "wide_console", lambda: Console(width=width))
    print_six_readers()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    for name in READERS:  # nine metrics, two a table
        assert (
            sum(line.startswith(f"{name} ") and line.count("0.123 [0.101, 0.145] (1,234)") > 0 for line in lines) == 5
        )
    # nine metrics, four a table, of two readers
    assert sum(line.startswith("a [b] project ") and "0.123 (1,234)" in line for line in lines) == 6


def test_base_and_adapter_stand_beside_the_four_readers_that_frame_them(
    corpus: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[str] = []

    def fit(tasks: Sequence[ReadingTask]) -> PositionRule:
        fitted.extend(task.task_id for task in tasks)
        return fit_position_rule(tasks)

    monkeypatch.setattr("poimen_exp.evaluation.evaluate.fit_position_rule", fit)
    found = evaluate(corpus, "--adapter", str(adapter))
    assert fitted == [task.task_id for task in small_setup(small_settings(corpus)).corpus.split("train")]
    assert [reader["reader"] for reader in found["readers"]] == READERS
    assert (found["split"], found["tasks"], found["projects"], found["samples"]) == ("val", 4, 1, 1)
    base, tuned = (reader["overall"]["gates/format_correct"]["mean"] for reader in found["readers"][:2])
    assert base == 1.0 > tuned


def test_an_adapter_that_is_not_there_is_refused(corpus: Path) -> None:
    with pytest.raises(Refused, match="/nope: no adapter there"):
        evaluate(corpus, "--adapter", "/nope")


def test_fixed_gates_have_the_accuracies_they_must_have(framed: Any) -> None:
    of = {reader["reader"]: reader["overall"] for reader in framed["readers"]}
    assert list(of) == [name for name in READERS if name != "adapter"]
    assert (of["oracle gates"][PRESENT]["mean"], of["oracle gates"][FREE]["mean"]) == (1.0, 1.0)
    assert (of["always update"][PRESENT]["mean"], of["always update"][FREE]["mean"]) == (1.0, 0.0)
    assert (of["never update"][PRESENT]["mean"], of["never update"][FREE]["mean"]) == (0.0, 1.0)
    assert of["oracle gates"]["gates/exit/exact"]["mean"] == 1.0
    for reader in of.values():
        total = reader["reward/total"]  # three readings of each of the four tasks
        assert (total["count"], total["counts"], total["resampled"]) == (12, "trajectories", "tasks")


def test_a_run_without_its_adapter_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omegaconf import OmegaConf

    from poimen_exp.config.compose import compose_config

    cfg = compose_config(["+experiment=quickstart"])
    (tmp_path / "resolved.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    monkeypatch.setitem(sys.modules, "poimen_exp.evaluation.evaluate", None)  # importing it would be an ImportError
    done = CliRunner().invoke(app, ["eval", str(tmp_path)])
    assert isinstance(done.exception, Refused)
    assert "has no adapter yet" in str(done.exception)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("multirun/fake/2026-01-02/0", "no such folder, expected the folder of a run .*mean .*fake/2026-01-01"),
        ("multirun/fake/2026-01-01", "neither resolved.yaml nor config.json .*did you mean .*2026-01-01/0"),
        ("multirun", "neither resolved.yaml nor config.json there, expected the folder of a run .* or of a model$"),
    ],
    ids=["misspelt", "a-sweep", "no-run"],
)
def test_a_target_that_is_no_run_is_named_with_the_one_that_may_be_meant(
    tmp_path: Path, asked: str, message: str
) -> None:
    run = tmp_path / "multirun" / "fake" / "2026-01-01" / "0"
    run.mkdir(parents=True)
    (run / "resolved.yaml").write_text("alpha: 0.9")
    done = CliRunner().invoke(app, ["eval", str(tmp_path / asked)])
    assert isinstance(done.exception, Refused)
    assert re.search(message, str(done.exception))


def test_a_split_that_the_corpus_does_not_have_is_refused(corpus: Path) -> None:
    with pytest.raises(Refused, match="test"):
        evaluate(corpus, "--split", "test")
