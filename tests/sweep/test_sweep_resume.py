"""What a kill, a second start, a grown grid and a changed config do."""

from __future__ import annotations

import json
from pathlib import Path

from .sweep_bench import Bench, wait_until


def _content(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_killed_sweep_goes_on_in_its_folder_with_what_is_missing(bench: Bench) -> None:
    command = ("corpus=c", "alpha=0.8,0.9,1.0")
    started = bench.start(*command, HANG="0.9")
    wait_until(lambda: len(bench.runs()) == 2, "the second trial began")
    started.kill()
    [folder] = bench.sweeps()
    first, second = _content(folder / "0"), _content(folder / "1")

    done = bench.sweep(*command)
    assert done.code == 0, done.text
    assert bench.sweeps() == [folder]
    assert [alpha for alpha, _ in bench.runs()] == ["0.8", "0.9", "0.9", "1.0"]
    assert "3 trials, 1 of them complete" in done.text
    assert "trial 1 was left running by a sweep that is gone: failed, to be repeated" in done.text
    assert _content(folder / "0") == first
    assert _content(folder / "1") == second
    states = [trial["state"] for trial in json.loads((folder / "trials.json").read_text())["trials"]]
    assert states == ["complete", "fail", "complete", "complete"]


def test_a_run_that_had_written_its_result_when_the_sweep_was_killed_is_not_repeated(bench: Bench) -> None:
    command = ("corpus=c", "alpha=0.9,1.0")
    started = bench.start(*command, HANG_AFTER_RESULT="0.9")
    wait_until(lambda: bool(list(bench.folder.glob("multirun/fake/*/0/result.json"))), "the first result")
    started.kill()
    done = bench.sweep(*command)
    assert done.code == 0, done.text
    assert [alpha for alpha, _ in bench.runs()] == ["0.9", "1.0"]
    assert "trial 0 had finished when its sweep was killed: completed with 0.91" in done.text


def test_a_grown_grid_adds_trials_and_a_finished_command_starts_anew(bench: Bench) -> None:
    assert bench.sweep("corpus=c", "alpha=0.9,1.0").code == 0
    [folder] = bench.sweeps()
    # 1.00 is the value 1.0, in another order.
    grown = bench.sweep("corpus=c", "alpha=0.5,1.00,0.9")
    assert grown.code == 0, grown.text
    assert bench.sweeps() == [folder]
    assert [alpha for alpha, _ in bench.runs()] == ["0.9", "1.0", "0.5"]

    shown = bench.sweep("corpus=c", "alpha=0.9,1.0", f"sweep.resume={folder}")
    assert (shown.code, len(bench.sweeps()), len(bench.runs())) == (0, 1, 3)
    again = bench.sweep("corpus=c", "alpha=0.9,1.0")
    assert again.code == 0
    assert len(bench.sweeps()) == 2
    assert [alpha for alpha, _ in bench.runs()][3:] == ["0.9", "1.0"]
    named = f"{folder.relative_to(bench.folder)}: this sweep is finished there"
    assert again.text.index(named) < again.text.index("2 trials, 0 of them complete")
    assert f"poimen report {folder.relative_to(bench.folder)}; " in again.text
    assert named not in grown.text


def test_a_changed_base_config_is_another_sweep_and_is_refused_in_a_forced_folder(bench: Bench) -> None:
    assert bench.sweep("corpus=c", "alpha=0.9,1.0").code == 0
    [folder] = bench.sweeps()
    before = _content(folder)
    forced = f"sweep.resume={folder}"
    refused = bench.sweep("corpus=d", "alpha=0.9,1.0", "lora=large", forced)
    assert refused.code == 2
    assert 'corpus: "c" there, "d" in this command' in refused.text
    assert 'label: "c-x" there, "d-x" in this command' in refused.text
    assert "lora.rank: 16 there, 32 in this command" in refused.text
    assert "seed" not in refused.text.partition("keys differ")[2]
    turned = bench.sweep("corpus=c", "alpha=0.9,1.0", forced, "hydra.sweeper.direction=minimize")
    assert turned.code == 2
    assert "hydra.sweeper.direction: maximize there, minimize in this command" in turned.text
    assert _content(folder) == before

    other = bench.sweep("corpus=d", "alpha=0.9")
    assert other.code == 0
    assert len(bench.sweeps()) == 2
    assert bench.sweep("corpus=c", "alpha=0.7,0.9", forced).code == 0
    assert bench.runs()[-1] == ("0.7", "1")
    assert len(bench.sweeps()) == 2
    # Not a part of what a trial is given.
    assert "resume" not in (folder / "2/.hydra/overrides.yaml").read_text()


def test_two_sweeps_of_one_second_have_two_folders_and_a_live_one_cannot_be_forced(bench: Bench) -> None:
    command = ("corpus=c", "alpha=0.9,1.0")
    where = "hydra.sweep.dir=multirun/fake/noon"
    first = bench.start(*command, where, HANG="1.0")
    wait_until(lambda: len(bench.runs()) == 2, "the first sweep is at work")
    forced = bench.sweep(*command, where)
    assert forced.code == 2
    assert "held by process" in forced.text
    [folder] = bench.sweeps()
    assert bench.sweep(*command, f"sweep.resume={folder}").code == 2

    pair = [bench.start(*command, SWEEPS="3") for _ in range(2)]
    assert [one.wait() for one in pair] == [0, 0]
    assert len(bench.sweeps()) == 3
    assert first.process.is_alive()
    assert len(bench.runs()) == 2 + 4


def test_interrupted_means_failed_in_the_study_and_a_table(bench: Bench) -> None:
    started = bench.start("corpus=c", "alpha=0.9,1.0", HANG="0.9")
    wait_until(lambda: len(bench.runs()) == 1, "the first trial began")
    started.interrupt()
    assert started.wait() != 0
    [folder] = bench.sweeps()
    [trial] = json.loads((folder / "trials.json").read_text())["trials"]
    assert (trial["state"], trial["reason"]) == ("fail", "interrupted")
    assert "│ fail " in started.text
