"""What a user sees while a run trains."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from poimen_exp.tracking.metrics_log import MetricLine
from poimen_exp.tracking.progress import ProgressLine, best_validation, format_duration, print_results

EVIDENCE, FREE = "gates/update_accuracy/evidence_present", "gates/update_accuracy/evidence_free"


def line(step: int, time_s: float, side: str, values: dict[str, tuple[float, int]], /, **other: float) -> MetricLine:
    metrics = {f"{side}/{name}": value for name, (value, _) in values.items()}
    counts = {f"{side}/{name}": count for name, (_, count) in values.items()}
    return MetricLine(step, time_s, {**metrics, **{f"timing_s/{name}": value for name, value in other.items()}}, counts)


def plain(width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=False), out


def test_a_line_names_every_number_with_its_denominator() -> None:
    console, out = plain()
    progress = ProgressLine(50, console)
    values = {EVIDENCE: (0.93, 182), FREE: (0.714, 540), "gates/exit/exact": (0.41, 64), "reward/total": (1.125, 64)}
    progress(line(3, 40.0, "train", values, step=12.5))
    # 47 steps of 12.5 s are left: 587.5 s
    assert out.getvalue() == (
        "step 3/50  update ok on evidence 0.93 (182 chunks)  update ok without evidence 0.71 (540 chunks)"
        "  exit exact 0.41 (64 trajectories)  train reward 1.12 (64 trajectories)  12.5 s/step  ETA 9 min 48 s\n"
    )


def test_what_was_not_measured_is_not_shown() -> None:
    console, out = plain()
    values = {"reward/total": (1.0, 4), "gates/chunks_read": (3.0, 4)}
    ProgressLine(2, console)(line(1, 1.0, "train", values, step=2.0))
    assert out.getvalue() == "step 1/2  train reward 1.00 (4 trajectories)  2.0 s/step  ETA 2 s\n"


def test_a_batch_of_prompts_shows_its_score_as_the_reward() -> None:
    console, out = plain()
    score = "critic/score/mean"
    ProgressLine(2, console)(MetricLine(1, 1.0, {score: 0.25, "timing_s/step": 2.0}, {score: 32}))
    assert out.getvalue() == "step 1/2  train reward 0.25 (32 responses)  2.0 s/step  ETA 2 s\n"
    out.truncate(0)
    both = {score: 0.25, "train/reward/total": 0.5, "timing_s/step": 2.0}  # verl logs its own beside ours
    ProgressLine(2, console)(MetricLine(1, 1.0, both, {}))
    assert out.getvalue().count("reward") == 1


def test_a_validation_has_a_line_of_its_own() -> None:
    console, out = plain()
    progress = ProgressLine(10, console)
    progress(line(0, 5.0, "val", {"reward/total": (0.5, 32), "gates/exit/exact": (0.25, 32)}, testing=4.0))
    assert out.getvalue() == (  # and no "step 0/10" without a number before it
        "validation at step 0  exit exact 0.25 (32 trajectories)  val reward 0.50 (32 trajectories)\n"
    )


def test_prompts_are_counted_in_responses() -> None:
    validation = line(0, 5.0, "val", {"reward/total": (0.5, 3200), "response_length/mean": (9.0, 3200)}, testing=4.0)
    console, out = plain()
    ProgressLine(10, console)(validation)
    assert out.getvalue() == "validation at step 0  val reward 0.50 (3,200 responses)\n"
    out.truncate(0)
    print_results([validation], console=console)
    assert ["reward,", "mean", "responses", "0.50", "(3,200)"] in [row.split() for row in out.getvalue().splitlines()]


def test_without_a_measured_step_time_the_record_gives_it() -> None:
    console, out = plain()
    progress = ProgressLine(3, console)
    progress(line(1, 10.0, "train", {"reward/total": (1.0, 4)}))
    progress(line(2, 14.0, "train", {"reward/total": (1.0, 4)}))
    assert "ETA" not in out.getvalue().splitlines()[0]
    assert out.getvalue().splitlines()[1].endswith("  4.0 s/step  ETA 4 s")


def test_a_terminal_gets_colours_and_a_file_does_not() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, color_system="standard" if terminal else "auto")
        ProgressLine(2, console)(line(1, 1.0, "train", {"reward/total": (1.0, 4)}))
        assert ("\x1b[" in out.getvalue()) == terminal


@pytest.mark.parametrize(
    ("seconds", "text"), [(41.6, "42 s"), (59.9, "1 min 0 s"), (582, "9 min 42 s"), (11100, "3 h 5 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def validations() -> list[MetricLine]:
    rewards = {0: 0.5, 10: 1.5, 20: 1.5, 30: 1.0}
    return [
        line(step, step, "val", {"reward/total": (reward, 32), EVIDENCE: (reward / 2, 70), FREE: (0.25, 90)})
        for step, reward in rewards.items()
    ]


def test_the_best_validation_is_the_first_of_equals() -> None:
    assert best_validation(validations()) == 10
    assert best_validation([]) is None


def test_the_result_table_has_base_beside_best_and_last_with_n() -> None:
    console, out = plain(120)
    print_results(validations(), console=console)
    rows = [row.split() for row in out.getvalue().splitlines()]
    assert rows[1] == ["base", "best", "last"]
    assert rows[2] == ["n", "counts", "step", "0", "step", "10", "step", "30"]
    assert ["reward,", "mean", "trajectories", "0.50", "(32)", "1.50", "(32)", "1.00", "(32)"] in rows
    wanted = ["update", "ok", "on", "evidence,", "share", "chunks", "0.25", "(70)", "0.75", "(70)", "0.50", "(70)"]
    assert wanted in rows
    assert not any("parsed" in word for row in rows for word in row)  # nothing was measured


def test_one_validation_is_one_column_and_a_late_first_one_is_no_base() -> None:
    console, out = plain(120)
    print_results(validations()[1:2], console=console)
    assert "first, best, last" in out.getvalue()
    assert "base" not in out.getvalue()


def test_the_table_fits_a_narrow_log() -> None:
    console, out = plain(80)
    print_results(validations(), console=console)
    assert "update ok without evidence, share" in out.getvalue()
    assert "0.25 (90)" in out.getvalue()


def test_without_a_validation_there_is_a_sentence_instead_of_a_table() -> None:
    console, out = plain()
    print_results([], console=console)
    assert out.getvalue() == "no validation was logged: no result table\n"
