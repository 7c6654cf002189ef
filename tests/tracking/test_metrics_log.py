"""``metrics.jsonl``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from poimen_exp.errors import RunFailed
from poimen_exp.tracking.metrics_log import MetricsLog, by_step, lines_logged, read_metrics

EXACT = "train/gates/exit/exact"
VALUE = "val/reward/total"


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def filled(path: Path, steps: int) -> MetricsLog:
    log = MetricsLog(path)
    for step in range(1, steps + 1):
        log.append(step, {EXACT: step / 10}, {EXACT: 64})
    return log


def test_a_line_has_the_exact_form_of_the_contract(path: Path) -> None:
    clock = Clock(100.0)
    log = MetricsLog(path, clock)
    clock.now = 112.5
    log.append(3, {EXACT: 0.41, "actor/pg_loss": 0.25}, {EXACT: 64})
    log.close()
    assert path.read_text() == (
        '{"step": 3, "time_s": 12.5, "metrics": {"actor/pg_loss": 0.25, "train/gates/exit/exact": 0.41}, '
        '"counts": {"train/gates/exit/exact": 64}}\n'
    )


def test_a_line_is_on_disk_when_append_returns(path: Path) -> None:
    log = filled(path, 1)
    assert len(read_metrics(path).lines) == 1
    log.close()


def test_a_metric_that_was_not_measured_is_absent(path: Path) -> None:
    log = MetricsLog(path)
    log.append(1, {EXACT: float("nan"), VALUE: 1.0}, {EXACT: 0, VALUE: 8})
    log.close()
    line = json.loads(path.read_text())
    assert line["metrics"] == {VALUE: 1.0}
    assert line["counts"] == {VALUE: 8}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_name_and_nothing_is_written(path: Path, value: float) -> None:
    log = MetricsLog(path)
    with pytest.raises(RunFailed, match=rf"actor/grad_norm at step 4: got {value}"):
        log.append(4, {EXACT: 0.5, "actor/grad_norm": value}, {EXACT: 2})
    log.close()
    assert path.read_text() == ""


def test_a_mean_without_its_denominator_is_refused(path: Path) -> None:
    log = MetricsLog(path)
    with pytest.raises(RunFailed, match=f"{EXACT} at step 1: a mean without its count of trajectories"):
        log.append(1, {EXACT: 0.5}, {})
    log.close()


@pytest.mark.parametrize("counts", [{EXACT: 2, VALUE: 3}, {EXACT: 2, "actor/pg_loss": -1}])
def test_a_count_without_its_metric_or_below_zero_is_refused(path: Path, counts: dict[str, int]) -> None:
    log = MetricsLog(path)
    with pytest.raises(RunFailed, match=r"without a metric of that name, or negative"):
        log.append(1, {EXACT: 0.5}, counts)
    log.close()


def test_an_unknown_name_is_refused(path: Path) -> None:
    log = MetricsLog(path)
    with pytest.raises(RunFailed, match="'train/gate/exit/exact': not a known name"):
        log.append(1, {"train/gate/exit/exact": 0.5}, {"train/gate/exit/exact": 2})
    log.close()


def test_a_validation_at_an_earlier_step_is_kept_but_no_metric_stands_twice(path: Path) -> None:
    log = filled(path, 2)
    log.append(1, {VALUE: 1.5}, {VALUE: 4})
    with pytest.raises(RunFailed, match=f"metric {VALUE} at step 1 is logged already"):
        log.append(1, {VALUE: 1.5}, {VALUE: 4})
    log.close()
    lines = read_metrics(path).lines
    assert [line.step for line in lines] == [1, 2, 1]
    assert by_step(lines)[1].metrics == {EXACT: 0.1, VALUE: 1.5}
    assert list(by_step(lines)) == [1, 2]


def test_resuming_at_a_checkpoint_keeps_the_replayed_tail_apart(path: Path) -> None:
    log = filled(path, 2)
    offset = log.position
    prefix = path.read_bytes()
    log.append(3, {EXACT: 0.3}, {EXACT: 64})
    log.append(4, {EXACT: 0.4}, {EXACT: 64})
    tail = log.truncate_to(2, offset)
    assert path.read_bytes() == prefix
    assert tail is not None
    assert [line.step for line in read_metrics(tail).lines] == [3, 4]
    log.append(3, {EXACT: 0.3}, {EXACT: 64})  # again, and no longer "logged already"
    second = log.truncate_to(2, offset)
    log.close()
    assert second is not None
    assert second != tail
    assert [line.step for line in read_metrics(second).lines] == [3]
    assert lines_logged(path.parent) == 5  # two kept, two and one dropped


def test_the_offset_decides_what_a_line_of_the_same_step_becomes(path: Path) -> None:
    # The checkpoint of step 1 was saved before the validation of step 1 was logged.
    log = filled(path, 1)
    offset = log.position
    log.append(1, {VALUE: 1.5}, {VALUE: 4})
    assert log.truncate_to(1) is None
    assert log.truncate_to(1, offset) is not None
    log.close()
    assert len(read_metrics(path).lines) == 1


def test_truncating_without_an_offset_keeps_a_late_validation(path: Path) -> None:
    log = filled(path, 3)
    log.append(2, {VALUE: 1.5}, {VALUE: 4})
    log.truncate_to(2)
    log.close()
    assert [line.step for line in read_metrics(path).lines] == [1, 2, 2]


def test_everything_can_be_taken_back(path: Path) -> None:
    log = filled(path, 2)
    log.truncate_to(-1, 0)
    log.append(1, {EXACT: 0.9}, {EXACT: 3})
    log.close()
    assert [line.metrics[EXACT] for line in read_metrics(path).lines] == [0.9]


def test_an_offset_inside_a_line_is_damage(path: Path) -> None:
    log = filled(path, 2)
    with pytest.raises(RunFailed, match=r"byte 5 of step 1's checkpoint is not behind a whole line"):
        log.truncate_to(1, 5)
    with pytest.raises(RunFailed, match=r"a line of step 2 lies before byte"):
        log.truncate_to(1, log.position)
    log.close()


def test_time_goes_on_where_a_resumed_run_left_off(path: Path) -> None:
    clock = Clock(0.0)
    log = MetricsLog(path, clock)
    clock.now = 10.0
    log.append(1, {EXACT: 0.1}, {EXACT: 64})
    log.close()
    clock = Clock(5000.0)
    log = MetricsLog(path, clock)
    clock.now = 5002.0
    log.append(2, {EXACT: 0.2}, {EXACT: 64})
    log.close()
    assert [line.time_s for line in read_metrics(path).lines] == [10.0, 12.0]


def test_an_unfinished_last_line_is_left_out_told_and_kept(path: Path) -> None:
    filled(path, 2).close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "ti')
    read = read_metrics(path)
    assert ([line.step for line in read.lines], read.unfinished_bytes) == ([1, 2], 15)
    said: list[str] = []
    MetricsLog(path, say=said.append).close()
    assert path.read_bytes() == whole
    assert "the last line was not finished (15 bytes)" in said[0]
    assert (path.parent / "recovery-tails/metrics-unfinished-line.jsonl").read_bytes() == b'{"step": 3, "ti'


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b"not json",
        b'{"step": 2, "time_s": 1.0, "metrics": {"train/reward/total": NaN}, "counts": {"train/reward/total": 1}}',
        b'{"step": 2.5, "time_s": 1.0, "metrics": {}, "counts": {}}',
        b'{"step": 2, "time_s": 1.0, "metrics": {}, "counts": {"train/reward/total": 1}}',
        b'{"step": 2, "time_s": 1.0, "metrics": {"train/reward/total": 1}, "counts": {"train/reward/total": 0}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_line_is_named_with_its_number(path: Path, raw: bytes) -> None:
    filled(path, 1).close()
    path.write_bytes(path.read_bytes() + raw + b"\n")
    with pytest.raises(RunFailed, match=r"metrics\.jsonl:2: damaged"):
        read_metrics(path)
