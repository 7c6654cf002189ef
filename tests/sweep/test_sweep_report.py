"""The report: numbers worked out by hand, and what it says of a sweep that is not finished."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from poimen_exp.app import resumed_config
from poimen_exp.cli import app
from poimen_exp.errors import Refused
from poimen_exp.sweep import records
from poimen_exp.sweep.compare import Collapse, Row, verdict
from poimen_exp.sweep.figures import curves_of, mean_of
from poimen_exp.sweep.records import load_sweep
from poimen_exp.sweep.report import as_markdown, make_report, table_cells, unfinished, write_report
from poimen_exp.sweep.stats import paired_difference, t_interval

FREE = "gates/update_accuracy/evidence_free"
REWARD = "val/reward/total"


def _line(step: int, **metrics: float) -> str:
    names = {"reward": REWARD, "free": f"val/{FREE}", "train_free": f"train/{FREE}", "exact": "val/gates/exit/exact"}
    values = {names[key]: value for key, value in metrics.items()}
    return json.dumps({"step": step, "time_s": 0.5, "metrics": values, "counts": dict.fromkeys(values, 10)}) + "\n"


def _run(sweep: Path, job: int, alpha: str, seed: int, lines: list[str], status: str | None = "completed") -> None:
    folder = sweep / str(job)
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/config.yaml").write_text(f"alpha: {alpha}\nseed: {seed}\n")
    (folder / ".hydra/overrides.yaml").write_text(f"- corpus.path=c\n- alpha={alpha}\n- seed={seed}\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    if status is not None:
        objective = {"name": REWARD, "value": 1.0}
        result = {"status": status, "objective": objective, "step": 10, "best_step": 5, "adapter": None}
        (folder / "result.json").write_text(json.dumps(result))


def _sweep(tmp_path: Path) -> Path:
    """alpha 0.9 rises from 0.5 to 0.9 on evidence-free chunks, alpha 1.0 falls from 0.5 to 0.1."""
    sweep = tmp_path / "multirun/fake/noon"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(json.dumps({"swept": ["alpha", "seed"]}))
    for seed, reward in ((1, 1.0), (2, 1.2), (3, 1.7)):
        lines = [_line(0, reward=0.2, free=0.5), _line(5, reward=2.0, free=0.7), _line(10, reward=reward, free=0.9)]
        _run(sweep, seed, "0.9", seed, lines)
        _run(sweep, 10 + seed, "1.0", seed, [_line(0, free=0.5), _line(10, reward=reward - 0.1 * seed, free=0.1)])
    return sweep


def test_a_t_interval_has_n_minus_one_degrees_of_freedom() -> None:
    found = t_interval([1.0, 1.2, 1.7])
    # mean 1.3, deviations -0.3, -0.1, 0.4: variance 0.26 / 2 = 0.13; t(0.975, 2) = 4.3027.
    half = 4.302652729911275 * math.sqrt(0.13) / math.sqrt(3)
    assert (found.mean, found.n) == (pytest.approx(1.3), 3)
    assert found.low == pytest.approx(1.3 - half, abs=1e-9)
    assert found.high == pytest.approx(1.3 + half, abs=1e-9)
    alone = t_interval([0.4])
    assert (alone.mean, alone.low, alone.high, alone.n) == (0.4, None, None, 1)


def test_a_paired_difference_uses_only_shared_seeds_and_keeps_the_pairs() -> None:
    found = paired_difference({1: 1.0, 2: 5.0, 3: 2.0}, {3: 2.5, 1: 1.5, 9: 100.0})
    # Both pairs differ by 0.5, so that every resample does: unpaired values would spread.
    assert found is not None
    assert (found.mean, found.low, found.high, found.n) == (0.5, 0.5, 0.5, 2)
    assert paired_difference({1: 1.0}, {2: 1.0}) is None
    one = paired_difference({1: 1.0}, {1: 0.0})
    assert one is not None
    assert (one.mean, one.low, one.n) == (-1.0, None, 1)


def test_a_bootstrap_interval_of_two_seeds_is_their_range() -> None:
    # Of the four resamples of {0, 1}, a quarter has mean 0 and a quarter mean 1: both ends lie in the 2.5 % tails.
    found = paired_difference({1: 0.0, 2: 0.0}, {1: 0.0, 2: 1.0})
    assert found is not None
    assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)


def test_the_table_has_means_over_seeds_at_the_last_or_the_best_validation(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path)
    last = make_report(sweep, "last", None, partial=False)
    assert last.is_finished
    by_alpha = {dict(row.setting)["alpha"]: row for row in last.rows}
    assert list(by_alpha) == ["0.9", "1.0"]
    # 1.0, 1.2, 1.7; and 0.9, 1.0, 1.4.
    assert by_alpha["0.9"].estimates[REWARD].mean == pytest.approx(1.3)
    assert by_alpha["1.0"].estimates[REWARD].mean == pytest.approx(1.1)
    assert by_alpha["0.9"].seeds == (1, 2, 3)
    best = make_report(sweep, "best", None, partial=False)
    assert best.rows[0].estimates[REWARD].mean == 2.0
    assert best.rows[0].estimates[f"val/{FREE}"].mean == pytest.approx(0.7)
    assert "val/gates/exit/exact" not in last.rows[0].estimates
    written = as_markdown(last)
    assert "| metric | n counts | alpha 0.9 (3 seeds) | alpha 1.0 (3 seeds) |" in written
    assert "| reward, mean | trajectories | 1.300 [" in written
    assert "] (n 30) |" in written  # three seeds of ten
    assert "exit exact" not in written  # no run has it


def _alone(tmp_path: Path, lines: list[str]) -> Path:
    """A sweep of one run."""
    sweep = tmp_path / "multirun/fake/noon"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(json.dumps({"swept": ["alpha", "seed"]}))
    _run(sweep, 0, "0.9", 1, lines)
    return sweep


def test_the_best_of_equal_validations_is_the_first_and_n_is_its_own(tmp_path: Path) -> None:
    best = json.loads(_line(5, reward=2.0, free=0.7))
    best["counts"] = dict.fromkeys(best["counts"], 7)
    lines = [_line(0, reward=1.0, free=0.5), json.dumps(best) + "\n", _line(10, reward=2.0, free=0.9)]
    [row] = make_report(_alone(tmp_path, lines), "best", None, partial=False).rows
    assert row.estimates[f"val/{FREE}"].mean == 0.7
    assert row.counts == {REWARD: 7, f"val/{FREE}": 7}


def test_a_small_fall_is_no_collapse_of_its_seed(tmp_path: Path) -> None:
    lines = [_line(0, reward=1.0, free=0.5), _line(10, reward=1.0, free=0.45)]
    said = make_report(_alone(tmp_path, lines), "last", None, partial=False).verdict
    assert "no setting collapsed. alpha 0.9: 0.500 -> 0.450, fell in 0 of 1 seed." in said


def test_two_alphas_are_compared_by_seed(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path)
    [comparison] = make_report(sweep, "last", None, partial=False).comparisons
    # The reference is 0.9: -0.1, -0.2, -0.3.
    assert (dict(comparison.first)["alpha"], dict(comparison.second)["alpha"]) == ("0.9", "1.0")
    reward = comparison.differences[REWARD]
    assert (reward.mean, reward.n) == (pytest.approx(-0.2), 3)
    assert (reward.low, reward.high) == (pytest.approx(-0.3), pytest.approx(-0.1))
    [turned] = make_report(sweep, "last", ("1", "0.9"), partial=False).comparisons
    assert turned.differences[REWARD].mean == pytest.approx(0.2)
    with pytest.raises(Refused, match=r"--compare: 0 settings have alpha 0.5, expected one; the sweep has alpha 0.9"):
        make_report(sweep, "last", ("0.5", "0.9"), partial=False)


def test_the_verdict_names_the_setting_that_collapsed_and_the_numbers_of_all(tmp_path: Path) -> None:
    assert make_report(_sweep(tmp_path), "last", None, partial=False).verdict == (
        "Evidence-free collapse (update accuracy falls by more than 0.10): collapsed at alpha 1.0. "
        "alpha 0.9: 0.500 -> 0.900, fell in 0 of 3 seeds; alpha 1.0: 0.500 -> 0.100, fell in 3 of 3 seeds."
    )
    held = verdict([Collapse((("alpha", "1.0"),), 0.5, 0.45, 0, 2)])
    assert "no setting collapsed. alpha 1.0: 0.500 -> 0.450, fell in 0 of 2 seeds" in held
    assert "no run has recorded" in verdict([])


def test_without_a_validation_at_the_start_the_first_rollouts_are_the_start(tmp_path: Path) -> None:
    sweep = tmp_path / "s"
    lines = [_line(1, train_free=0.6), _line(5, reward=1.0, free=0.3, train_free=0.4), _line(9, train_free=0.2)]
    _run(sweep, 0, "1.0", 1, lines)
    assert "alpha 1.0: 0.600 -> 0.200" in make_report(sweep, "last", None, partial=False).verdict


def test_an_unfinished_sweep_says_so_and_counts_only_what_ended(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path)
    (sweep / "13/result.json").unlink()
    with (sweep / "13/metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "metr')  # killed while writing
    (sweep / "trials.json").write_text(json.dumps({"slots": [str(n) for n in range(8)], "trials": []}))
    report = make_report(sweep, "last", None, partial=False)
    text = as_markdown(report)
    assert not report.is_finished
    assert "UNFINISHED SWEEP: 5 of 8 trials have ended; only those are in the tables." in text
    assert "alpha 1.0, seed 3 is at step 10; 2 of 8 trials have not begun." in text
    assert report.rows[1].seeds == (1, 2)
    partial = make_report(sweep, "last", None, partial=True)
    assert partial.rows[1].seeds == (1, 2, 3)
    assert "all runs are in the tables, up to step 10" in as_markdown(partial)


def test_partial_judges_all_runs_at_the_last_step_that_all_validated(tmp_path: Path) -> None:
    sweep = tmp_path / "s"
    _run(sweep, 0, "0.9", 1, [_line(5, reward=1.0), _line(10, reward=2.0)])
    _run(sweep, 1, "1.0", 1, [_line(5, reward=0.5)], status=None)
    _run(sweep, 2, "1.0", 2, [], status=None)
    report = make_report(sweep, "last", None, partial=True)
    assert [row.estimates[REWARD].mean for row in report.rows] == [1.0, 0.5]


def test_a_repeated_trial_counts_once_and_a_collapse_stop_is_an_end(tmp_path: Path) -> None:
    sweep = tmp_path / "s"
    _run(sweep, 0, "1.0", 1, [_line(5, reward=0.1)], status="failed")
    _run(sweep, 1, "1.0", 1, [_line(5, reward=0.7)], status="stopped")
    _run(sweep, 2, "1.0", 1, [_line(50, reward=0.2)], status=None)
    [run] = load_sweep(sweep).runs
    assert run.folder.name == "1"
    assert run.ended


def test_other_swept_keys_make_settings_of_their_own(tmp_path: Path) -> None:
    sweep = tmp_path / "s"
    for job, rank in enumerate(("rank16", "rank32")):
        _run(sweep, job, "0.9", 1, [_line(5, reward=float(job))])
        with (sweep / f"{job}/.hydra/overrides.yaml").open("a") as file:
            file.write(f"- lora={rank}\n")
    (sweep / "sweep.json").write_text(json.dumps({"swept": ["lora", "seed"]}))
    settings = load_sweep(sweep).settings
    assert settings == ((("alpha", "0.9"), ("lora", "rank16")), (("alpha", "0.9"), ("lora", "rank32")))


def test_a_mean_curve_has_only_the_steps_of_all_seeds(tmp_path: Path) -> None:
    assert mean_of([{0: 1.0, 5: 2.0, 10: 9.0}, {0: 3.0, 5: 4.0}]) == {0: 2.0, 5: 3.0}
    assert mean_of([]) == {}
    curves = curves_of(load_sweep(_sweep(tmp_path)), REWARD)
    assert [(one.name, len(one.seeds), list(one.mean)) for one in curves] == [
        ("alpha 0.9", 3, [0, 5, 10]), ("alpha 1.0", 3, [10]),
    ]  # fmt: skip
    assert curves[0].color != curves[1].color


def test_the_page_needs_no_network_and_the_picture_is_a_png(tmp_path: Path) -> None:
    report = make_report(_sweep(tmp_path), "last", None, partial=False)
    paths = write_report(report, tmp_path / "out")
    assert [path.name for path in paths] == ["report.md", "report.json", "curves.png", "report.html"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    page = paths[3].read_text()
    own = page.replace(page[page.index("<script") : page.rindex("</script>")], "")
    assert "src=" not in own
    assert "Plotly.newPlot" in page
    assert "alpha 1.0 minus alpha 0.9, paired by seed" in own
    for title in ("Exact exits", "Validation reward", "Update accuracy, evidence-free chunks"):
        assert title in page
    assert json.loads(paths[1].read_text())["differences"][0]["metrics"][REWARD]["n"] == 3


def test_the_command_prints_table_verdict_and_files(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["report", str(sweep), "--compare", "0.9", "1.0"])
    assert done.exit_code == 0, done.output
    assert "-0.200 [-0.300, -0.100]" in done.output
    assert "collapsed at alpha 1.0" in done.output
    assert (sweep / "report/report.html").is_file()


def test_a_run_that_is_just_beginning_is_no_run_yet(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path)
    _run(sweep, 20, "1.0", 4, [])
    (sweep / "20/.hydra/overrides.yaml").unlink()
    assert {run.folder.name for run in load_sweep(sweep).runs} == {"1", "2", "3", "11", "12", "13"}


def test_a_run_that_ends_while_it_is_read_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = tmp_path / "sweep"
    _run(sweep, 1, "0.9", 1, [_line(5, reward=0.2)], status=None)
    read = records.read_metrics

    def read_and_end(path: Path) -> Any:
        kept = read(path)
        shutil.rmtree(sweep / "1")
        _run(sweep, 1, "0.9", 1, [_line(5, reward=0.2), _line(10, reward=0.9)])
        return kept

    monkeypatch.setattr(records, "read_metrics", read_and_end)
    (run,) = load_sweep(sweep).runs
    assert (run.ended, run.last_step) == (False, 5)
    monkeypatch.undo()
    (run,) = load_sweep(sweep).runs
    assert (run.ended, run.last_step) == (True, 10)


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no run lies here; expected a sweep's folder"):
        make_report(tmp_path, "last", None, partial=False)
    (tmp_path / "0").mkdir()
    (tmp_path / "0/resolved.yaml").touch()
    with pytest.raises(Refused, match=f"a single run, expected the folder around it: {tmp_path}$"):
        make_report(tmp_path / "0", "last", None, partial=False)
    with pytest.raises(Refused, match=rf"no run lies here; .* did you mean {tmp_path}/0\? A sweep goes on by"):
        resumed_config(tmp_path, [])


@pytest.mark.parametrize("status", [None, "failed"])
def test_a_trial_that_failed_is_not_said_to_go_on(tmp_path: Path, status: str | None) -> None:
    _run(tmp_path / "sweep", 1, "0.9", 1, [_line(5, reward=0.4)], status=status)
    (tmp_path / "sweep/1/error.txt").touch()
    [line] = unfinished(load_sweep(tmp_path / "sweep"))
    assert line == f"alpha 0.9, seed 1 failed after step 5, see {tmp_path}/sweep/1/error.txt"


def test_alphas_to_compare_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--compare: got 'a', expected two numbers"):
        make_report(_sweep(tmp_path), "last", ("a", "0.9"), partial=False)


def test_no_collapse_is_looked_for_in_runs_without_gates(tmp_path: Path) -> None:
    _run(tmp_path / "prompts", 1, "0.9", 1, [_line(0, reward=0.2), _line(5, reward=0.4)])
    report = make_report(tmp_path / "prompts", "last", None, partial=False)
    assert report.verdict == "Evidence-free collapse: not looked for, these runs train no gates."
    _run(tmp_path / "gates", 1, "0.9", 1, [_line(0, reward=0.2, exact=0.1)])
    report = make_report(tmp_path / "gates", "last", None, partial=False)
    assert report.verdict == "Evidence-free collapse: no run has recorded evidence-free update accuracy yet."


def test_a_sweep_over_prompts_has_the_lines_that_it_logs_and_counts_responses() -> None:
    rewards, lengths = t_interval([0.5, 0.5]), t_interval([12.0, 12.0])
    prompts = Row((("alpha", "0.9"),), {REWARD: rewards, "val/response_length/mean": lengths}, (1, 2), {REWARD: 16})
    assert [line[:2] for line in table_cells([prompts])] == [
        ["reward, mean", "responses"],
        ["response length, mean tokens", "responses"],
    ]
    gates = Row((("alpha", "1.0"),), {REWARD: rewards, f"val/{FREE}": rewards}, (1, 2), {REWARD: 16})
    assert [line[:2] for line in table_cells([gates])] == [
        ["reward, mean", "trajectories"],
        ["update ok without evidence, share", "chunks"],
    ]
    nothing_yet = Row((("alpha", "1.0"),), {}, (1,), {})
    cells = table_cells([nothing_yet])
    assert (len(cells), cells[0][1]) == (8, "trajectories")
