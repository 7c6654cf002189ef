"""Times the advantages of one paper-sized step on one core: 128 prompts x 16 rollouts x 7 rows = 14,336 rows.

python benchmarks/advantages.py
"""

from __future__ import annotations

import statistics
import time

import torch

from poimen_exp.gates.scoring import ANSWER_STEP, GateRows, row_advantages

PROMPTS, ROLLOUTS, CHUNKS = 128, 16, 6
LIMIT_MS = 20.0
REPEATS = 50


def make_rows(generator: torch.Generator) -> GateRows:
    """Rows of every rollout: its chunks, then its answer; a tenth of the chunks unlabelled, in no order."""
    trajectory = torch.arange(PROMPTS * ROLLOUTS).repeat_interleave(CHUNKS + 1)
    step = torch.arange(CHUNKS + 1).repeat(PROMPTS * ROLLOUTS)
    step[step == CHUNKS] = ANSWER_STEP
    labelled = torch.rand(step.shape, generator=generator) < 0.9
    reward = torch.randint(0, 2, step.shape, generator=generator).float() * 2 - 1
    order = torch.randperm(step.numel(), generator=generator)
    valid = (step != ANSWER_STEP) & labelled
    return GateRows(trajectory[order], trajectory[order] // ROLLOUTS, step[order], valid[order], reward[order])


def main() -> None:
    """Prints the median and the slowest of the repeats; exit code 1 above the limit."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = make_rows(generator)
    totals = torch.rand(PROMPTS * ROLLOUTS, generator=generator)
    group = torch.arange(PROMPTS * ROLLOUTS) // ROLLOUTS
    slowest = 0.0
    for baseline in ("group_step", "batch_step"):
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            row_advantages(totals, group, rows, 0.9, baseline)
            times.append(1000 * (time.perf_counter() - begun))
        median = statistics.median(times)
        slowest = max(slowest, median)
        print(f"{baseline}: {rows.step.numel():,} rows, median {median:.2f} ms, slowest {max(times):.2f} ms")
    if slowest > LIMIT_MS:
        raise SystemExit(f"median {slowest:.1f} ms, expected at most {LIMIT_MS:.0f} ms")


if __name__ == "__main__":
    main()
