"""Storage by one key, several processes on one study, and launchers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import optuna

from .sweep_bench import Bench

EIGHT = "alpha=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8"


def _states(url: str) -> Counter[str]:
    [summary] = optuna.get_all_study_summaries(url)
    study = optuna.load_study(study_name=summary.study_name, storage=url)
    return Counter(trial.state.name for trial in study.get_trials())


def test_two_sweeps_on_one_database_share_the_trials_and_run_none_twice(bench: Bench) -> None:
    url = f"sqlite:///{bench.folder / 'shared.db'}"
    command = ("corpus=c", EIGHT, f"sweep.storage={url}")
    pair = [bench.start(*command, SWEEPS="2") for _ in range(2)]
    assert [one.wait() for one in pair] == [0, 0], pair[0].text + pair[1].text
    assert Counter(alpha for alpha, _ in bench.runs()) == Counter(EIGHT.partition("=")[2].split(","))
    assert _states(url)["COMPLETE"] == 8
    assert len(bench.sweeps()) == 2
    used = [Path(folder).parent for folder, *_ in bench.log("run")]
    assert len(set(used)) == 2, "the second came two minutes late"


def test_a_journal_file_stores_the_trials_and_a_second_sweep_in_it_is_another_study(bench: Bench) -> None:
    path = bench.folder / "journal.log"
    command = ("corpus=c", "alpha=0.9,1.0", f"sweep.storage=journal://{path}")
    assert bench.sweep(*command).code == 0
    assert path.stat().st_size > 0
    [folder] = bench.sweeps()
    assert not (folder / "study.db").exists()
    assert bench.sweep(*command).code == 0
    assert len(bench.runs()) == 4
    moved = bench.sweep("corpus=c", "alpha=0.9,1.0", f"sweep.resume={folder}", "sweep.storage=sqlite:///other.db")
    assert moved.code == 2
    assert f"sweep.storage: journal://{path} there, sqlite:///other.db in this command" in moved.text


def test_a_storage_that_is_no_url_is_refused(bench: Bench) -> None:
    refused = bench.sweep("corpus=c", "alpha=0.9,1.0", "sweep.storage=postgres")
    assert refused.code == 2
    assert "sweep.storage: got 'postgres', expected an Optuna URL" in refused.text


def test_joblib_runs_two_trials_at_once_and_each_once(bench: Bench) -> None:
    done = bench.sweep(
        "corpus=c", "alpha=0.7,0.8,0.9,1.0", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", RAISE="0.8"
    )
    assert done.code == 1
    assert sorted(alpha for alpha, _ in bench.runs()) == ["0.7", "0.8", "0.9", "1.0"]
    [folder] = bench.sweeps()
    assert _states(f"sqlite:///{folder / 'study.db'}") == {"COMPLETE": 3, "FAIL": 1}
    # Written where it happened: an exception loses its traceback on the way back.
    assert 'raise ValueError("the corpus burned down")' in (folder / "1/error.txt").read_text()
    assert {Path(path).name for path, *_ in bench.log("run")} == {"0", "1", "2", "3"}


def test_a_worker_that_dies_fails_its_trial_and_the_same_command_repairs_it(bench: Bench) -> None:
    joblib = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_jobs=1")
    command = ("corpus=c", "alpha=0.9,1.0", *joblib)
    done = bench.sweep(*command, DIE="0.9")
    assert done.code == 1, done.text
    [folder] = bench.sweeps()
    assert "Terminated" in (folder / "0/error.txt").read_text()
    assert [alpha for alpha, _ in bench.runs()] == ["0.9", "1.0"]
    assert bench.sweep(*command).code == 0
    assert [alpha for alpha, _ in bench.runs()] == ["0.9", "1.0", "0.9"]
    assert bench.sweeps() == [folder]
