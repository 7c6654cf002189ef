"""A sweep from its command line to its exit code."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from poimen_exp.sweep.study import TrialRow
from poimen_exp.sweep.summary import print_summary

from .sweep_bench import Bench


def test_a_grid_runs_every_combination_and_values_keep_their_type(bench: Bench) -> None:
    done = bench.sweep("corpus=c", "alpha=0.9,1.0", "seed=1,2", "+x=5")
    assert done.code == 0, done.text
    assert bench.runs() == [("0.9", "1"), ("0.9", "2"), ("1.0", "1"), ("1.0", "2")]
    # The check saw the first trial, then each further value of each axis.
    assert bench.log("gate") == [[0.9, 1.0, 0.9]]
    [folder] = bench.sweeps()
    given = (folder / "2/.hydra/overrides.yaml").read_text().splitlines()
    assert given == ["- corpus=c", "- +x=5", "- alpha=1.0", "- seed=1"]
    assert "over alpha, seed runs in" in done.text
    assert "4 trials, 0 of them complete" in done.text
    assert done.text.count("complete │") == 4
    assert not (folder / ".lock").exists()


def test_the_end_of_a_sweep_gives_its_folder_and_the_command_of_its_report_to_copy() -> None:
    folder = Path("/data/runs of [may]") / ("long" * 20)
    rows = [TrialRow(0, "alpha=0.9", {"alpha": "0.9"}, "complete", 1.23456, folder / "0", "")]
    out = io.StringIO()
    print_summary(rows, folder, Console(file=out, width=80))
    first, *table, last = out.getvalue().splitlines()
    assert (first, last) == (f"trials of {folder}", f"poimen report '{folder}'")
    assert "val/reward/total, best" in table[1]
    assert "1.2346" in table[3]


def test_a_sweep_in_which_nothing_ended_well_has_no_report_to_offer() -> None:
    row = TrialRow(0, "alpha=0.9", {"alpha": "0.9"}, "fail", None, Path("sweep/0"), "ValueError: no")
    out = io.StringIO()
    print_summary([row], Path("sweep"), Console(file=out, width=80))
    assert "poimen report" not in out.getvalue()


def test_a_failed_gate_check_leaves_nothing_behind(bench: Bench) -> None:
    done = bench.sweep("corpus=c", "alpha=0.9,1.0", GATE="fail")
    assert done.code == 2
    assert "update reward: got -1, expected 1" in done.text
    assert bench.runs() == []
    assert not (bench.folder / "multirun").exists()
    assert sorted(path.name for path in bench.folder.iterdir()) == ["log", "output-0"]


def test_a_value_that_does_not_compose_is_refused_before_the_gate_check(bench: Bench) -> None:
    done = bench.sweep("corpus=c", "alpha=0.9,1.0", "lora=small,hugee")
    assert done.code != 0
    assert "Could not find 'lora/hugee'" in done.text
    assert bench.log("gate") == []
    assert not (bench.folder / "multirun").exists()


def test_a_sweep_group_is_run_and_a_value_fixed_on_the_command_line_shrinks_it_aloud(bench: Bench) -> None:
    done = bench.sweep("corpus=c", "+alpha_sweep=two", "alpha=1.0")
    assert done.code == 0, done.text
    assert bench.runs() == [("1.0", "1"), ("1.0", "2")]
    assert "alpha=1.0 is fixed on the command line: the sweep over alpha=0.9,1.0 is not run" in done.text


def test_what_fails_is_recorded_and_the_rest_goes_on_and_the_same_command_repairs_it(bench: Bench) -> None:
    command = ("corpus=c", "alpha=0.8,0.9,0.95,1.0")
    done = bench.sweep(*command, RAISE="0.8", RETURN="nan@0.9", EXIT="0.95")
    assert done.code == 1
    assert "3 of 4 trials failed: alpha=0.8; alpha=0.9; alpha=0.95" in done.text
    assert done.text.count("│ fail ") == 3
    assert done.text.count("│ complete ") == 1
    [folder] = bench.sweeps()
    assert 'raise ValueError("the corpus burned down")' in (folder / "0/error.txt").read_text()
    assert "the run returned nan, expected a finite number" in (folder / "1/error.txt").read_text()
    assert "SystemExit: 3" in (folder / "2/error.txt").read_text()
    assert not (folder / "3/error.txt").exists()

    again = bench.sweep(*command, RETURN="none@0.8")
    assert again.code == 1
    assert "the run returned None" in (folder / "4/error.txt").read_text()
    assert bench.sweep(*command).code == 0
    assert bench.sweeps() == [folder]
    assert [alpha for alpha, _ in bench.runs()[4:]] == ["0.8", "0.9", "0.95", "0.8"]


def test_an_interval_is_sampled_and_every_sample_runs_on_each_seed(bench: Bench) -> None:
    command = ("corpus=c", "alpha=interval(0.5,1.0)", "seed=1,2")
    done = bench.sweep(*command, "hydra.sweeper.n_trials=2")
    assert done.code == 0, done.text
    alphas = [alpha for alpha, _ in bench.runs()]
    assert alphas[0] == alphas[1] != alphas[2] == alphas[3]
    assert [seed for _, seed in bench.runs()] == ["1", "2", "1", "2"]
    assert all(0.5 <= float(alpha) <= 1.0 for alpha in alphas)

    assert bench.sweep(*command, "hydra.sweeper.n_trials=4").code == 0
    assert len(bench.sweeps()) == 1
    assert len(bench.runs()) == 8
    assert len({alpha for alpha, _ in bench.runs()}) == 4
