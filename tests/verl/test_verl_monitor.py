"""What a step reports, and the rules that end a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from verl_samples import scored

from poimen_exp.errors import RunFailed
from poimen_exp.gates.scoring import ScoredTrajectory, advantages_of
from poimen_exp.solo.checkpoint import Progress
from poimen_exp.solo.settings import CorpusSettings, GateSettings
from poimen_exp.tracking.metrics_log import clean
from poimen_exp.verl_backend.monitor import Monitor
from poimen_exp.verl_backend.settings import ReaderSettings, StopSettings, VerlSettings

CORPUS = CorpusSettings(Path("c"), 8, 9, 0.6, False, "refuse", 0, 0.15, 0.15, None)
GATES = GateSettings("chunk_first", "terse", 8, "zero_trajectory", "exact", "group_step", 0, 0.0, 1)
SETTINGS = VerlSettings(
    alpha=0.9,
    turn_baseline="group_step",
    reader=ReaderSettings(Path("m"), CORPUS, GATES, 64, 5.0),
    group_size=2,
    val_group_size=1,
    train_batch_size=2,
    mini_batches=1,
    rows_multiple=1,
    max_failed=0.25,
    stall_timeout_s=60.0,
    stop=StopSettings(patience=2, min_delta=0.0, on_collapse="warn"),
    lora_rank=4,
    device="cpu",
)


def monitor(settings: VerlSettings = SETTINGS, steps: int = 10) -> Monitor:
    return Monitor(settings, Progress(), steps, said.append)


said: list[str] = []


def batch() -> list[ScoredTrajectory]:
    return [scored((True,)), scored((False,), sample=1), replace(scored((True, None)), group=1)]


def roll(to: Monitor, items: list[ScoredTrajectory], attempted: int) -> None:
    to.rolled_out(items, *advantages_of(items, 0.9, "group_step"), attempted)


def test_means_stand_beside_their_denominators_and_failures_are_counted() -> None:
    run = monitor()
    roll(run, batch(), attempted=4)
    run.updated([0.5, 1.5])
    report = run.close_step(1, {"actor/pg_loss": 0.25, "critic/score/mean": 9.0, "actor/grad_norm": 99.0})
    # Update gates of the four chunk turns: yes, no, yes, unreadable: 2 of 4.
    assert (report.metrics["train/gates/update_rate"], report.counts["train/gates/update_rate"]) == (0.5, 4)
    assert (report.metrics["train/rollout/failed"], report.counts["train/rollout/failed"]) == (1.0, 4)
    assert (report.metrics["update/skipped"], report.counts["update/skipped"]) == (0.0, 2)
    assert report.metrics["actor/grad_norm"] == 1.0
    assert report.metrics["actor/pg_loss"] == 0.25
    assert "critic/score/mean" not in report.metrics  # a mean over rows
    assert "advantage/zero_turn_cells" in report.metrics
    clean(1, report.metrics, report.counts)  # names that the record knows, each mean with its count


def test_more_failed_rollouts_than_allowed_end_the_run() -> None:
    run = monitor()
    with pytest.raises(RunFailed, match=r"step 1: 2 of 4 rollouts failed, above rollout\.max_failed=0\.25"):
        roll(run, batch()[:2], attempted=4)


def test_a_validation_counts_as_better_only_above_the_best() -> None:
    run = monitor()
    for step, answer in enumerate(["no", "yes", "yes"]):  # totals 1, 2, 2: answer wrong, right, right
        run.validated([scored((True,), answer)], attempted=1)
        run.close_step(step, {})
    assert (run.progress.best_step, run.progress.best_value, run.progress.bad_validations) == (1, 2.0, 1)
    assert not run.converged
    run.validated([scored((True,), "no")], attempted=1)
    run.close_step(3, {})
    assert run.converged


def test_a_validation_without_one_finished_rollout_ends_the_run() -> None:
    with pytest.raises(RunFailed, match=r"every rollout failed, so val/reward/total does not exist"):
        monitor().validated([], attempted=3)


def test_three_skipped_optimizer_steps_in_a_row_end_the_run() -> None:
    run = monitor(steps=1000)
    run.updated([1.0, math.nan])
    run.close_step(1, {})
    run.check()
    run.updated([math.inf, math.nan, 1.0, math.nan])
    report = run.close_step(2, {})
    assert report.metrics["update/skipped"] == 3.0
    with pytest.raises(RunFailed, match="3 optimizer steps in a row and 4 of 1000 in all were skipped"):
        run.check()


def test_a_finite_step_between_skipped_ones_breaks_the_row() -> None:
    run = monitor(steps=1000)
    run.updated([math.nan, math.nan, 1.0, math.nan, math.nan])
    run.close_step(1, {})
    run.check()
    assert (run.progress.skipped, run.progress.skipped_in_a_row, run.progress.optimizer_steps) == (4, 2, 1)


def test_a_tenth_of_all_optimizer_steps_skipped_ends_the_run() -> None:
    run = monitor(steps=30)
    for step in range(1, 5):
        run.updated([1.0, math.nan])
        run.close_step(step, {})
        if step < 4:
            run.check()
    with pytest.raises(RunFailed, match="4 of 30 in all were skipped"):
        run.check()


def test_a_number_of_verls_that_is_not_finite_is_left_out() -> None:
    report = monitor().close_step(1, {"actor/ppo_kl": math.nan, "perf/throughput": 3.0})
    assert report.metrics == {"perf/throughput": 3.0}


def test_speeds_and_tokens_are_without_padding_rows_and_means_over_rows_are_left_out() -> None:
    run = monitor()
    roll(run, batch(), attempted=4)
    report = run.close_step(
        1,
        {
            "perf/total_num_tokens": 500.0,
            "perf/throughput": 100.0,
            "timing_s/gen": 2.0,
            "timing_s/update_actor": 4.0,
            "timing_per_token_ms/gen": 1.0,
            "rollout_corr/kl": 0.5,
            "rollout_corr/rollout_ppl": 3.0,
            "training/num_turns/mean": 3.0,
        },
    )
    # Four chunk turns of 4 + 3 tokens and three answers of 2 + 2: 40, of which 4 * 3 + 3 * 2 = 18 were sampled.
    assert report.metrics["perf/total_num_tokens"] == 40.0
    assert report.metrics["perf/throughput"] == 8.0  # 100 * 40 / 500
    assert report.metrics["perf/rollout_tokens_per_s"] == 9.0
    assert report.metrics["perf/update_tokens_per_s"] == 10.0
    left = {"timing_per_token_ms/gen", "rollout_corr/rollout_ppl", "training/num_turns/mean"}
    assert not left & report.metrics.keys()
    assert report.metrics["rollout_corr/kl"] == 0.5  # a mean over response tokens


def test_a_collapse_is_said_or_stops_the_run() -> None:
    # Everything updates and nobody exits: "end" is never written.
    def never_ends() -> list[ScoredTrajectory]:
        items = [scored((True, True, True)), scored((True, True, True), sample=1)]
        return [replace(item, trajectory=replace(item.trajectory, turns=tuple(
            turn if turn.gate is None else replace(turn, gate=replace(turn.gate, end=False))
            for turn in item.trajectory.turns
        ))) for item in items]  # fmt: skip

    said.clear()
    run = monitor()
    roll(run, never_ends(), attempted=2)
    run.close_step(1, {})
    run.check()
    assert said
    assert "collapse alarm" in said[0]
    strict = monitor(replace(SETTINGS, stop=StopSettings(None, 0.0, "stop")))
    roll(strict, never_ends(), attempted=2)
    strict.close_step(1, {})
    with pytest.raises(RunFailed, match=r"stopped by stop\.on_collapse"):
        strict.check()
