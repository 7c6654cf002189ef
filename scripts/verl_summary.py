"""Seconds of each phase, tokens a second and the sampler's distance from the trainer of a run, as JSON and Markdown.

    python scripts/verl_summary.py RUN OUT

Reads ``RUN/metrics.jsonl`` of any backend; writes ``OUT/summary.json`` and ``OUT/summary.md``. The first step is told
apart: caches are cold and kernels are chosen in it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from poimen_exp.tracking.metrics_log import MetricLine, by_step, read_metrics

PHASES = {
    "timing_s/gen": "rollout, s",
    "timing_s/old_log_prob": "old log-probs, s",
    "timing_s/ref": "reference log-probs, s",
    "timing_s/adv": "advantages, s",
    "timing_s/update_actor": "update, s",
    "timing_s/update_weights": "weights to the sampler, s",
    "timing_s/step": "step, s",
    "timing_s/testing": "validation, s",
}
OTHERS = {
    "perf/total_num_tokens": "tokens a step",
    "perf/throughput": "tokens/s of the step, a GPU",
    "perf/rollout_tokens_per_s": "sampled tokens/s of the rollout",
    "perf/update_tokens_per_s": "tokens/s of the update",
    "perf/max_memory_allocated_gb": "peak memory allocated, GB",
    "actor/perf/max_memory_allocated_gb": "peak memory allocated, GB",
    "training/rollout_probs_diff_mean": "sampler - trainer, probability, mean",
    "training/rollout_probs_diff_max": "sampler - trainer, probability, max",
    "training/sync/sampler_trainer_diff": "sampler - trainer, nats a token",
    "training/sync/trainer_base_diff": "trainer - base, nats a token",
    "training/sync/adapter_share": "share of the adapter that the sampler has",
    "train/reward/total": "reward, training",
    "val/reward/total": "reward, validation",
}


def summarise(lines: Sequence[MetricLine]) -> dict[str, dict[str, float]]:
    """Metric name to its first value, the mean of the later ones and their number; names that no step has are absent.

    Args:
        lines: one a step, in order; step 0, the validation before training, is left out.
    """
    steps = [line.metrics for line in lines if line.step > 0]
    found = {}
    for name in (*PHASES, *OTHERS):
        values = [metrics[name] for metrics in steps if name in metrics]
        if values:
            later = values[1:] or values
            found[name] = {"first": values[0], "later_mean": statistics.fmean(later), "later": len(later)}
    return found


def table(summary: dict[str, dict[str, float]]) -> str:
    """The summary as a Markdown table."""
    names = {**PHASES, **OTHERS}
    rows = ["| | first | mean of later | steps |", "|---|---|---|---|"]
    rows += [
        f"| {names[name]} | {of['first']:.4g} | {of['later_mean']:.4g} | {of['later']:g} |"
        for name, of in summary.items()
    ]
    return "\n".join(rows) + "\n"


def main(run: Path, out: Path) -> None:
    summary = summarise(list(by_step(read_metrics(run / "metrics.jsonl").lines).values()))
    result = json.loads((run / "result.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps({"result": result, "metrics": summary}, indent=1) + "\n")
    (out / "summary.md").write_text(table(summary))
    print(table(summary), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
