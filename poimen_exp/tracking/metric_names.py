"""Every metric name that a run may log. A name outside this list is a misspelling and is refused."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from poimen_exp.errors import RunFailed

Side = Literal["both", "train_only"]


@dataclass(frozen=True)
class Metric:
    """A metric of the gates.

    Attributes:
        side: ``both``: logged as ``train/<name>`` and ``val/<name>``; ``train_only``: logged as ``<name>``.
        per: what its denominator counts; None where the value is itself a count.
        meaning: a sentence for docs/metrics.md.
    """

    name: str
    side: Side
    per: str | None
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("gates/update_accuracy/evidence_present", "both", "chunks",
           "share of chunks with evidence whose update gate opened"),
    Metric("gates/update_accuracy/evidence_free", "both", "chunks",
           "share of chunks without evidence whose update gate stayed shut"),
    Metric("gates/update_rate", "both", "chunks", "share of chunks whose update gate opened"),
    Metric("gates/exit/exact", "both", "trajectories", "share that stopped at the exit target"),
    Metric("gates/exit/early", "both", "trajectories", "share that stopped before the exit target"),
    Metric("gates/exit/late", "both", "trajectories", "share that stopped after the exit target"),
    Metric("gates/format_correct", "both", "turns", "share that parsed, answer turns included"),
    Metric("gates/memory_tokens", "both", "chunks", "tokens in the memory after a chunk"),
    Metric("gates/chunks_read", "both", "trajectories", "chunks read before the answer"),
    Metric("reward/total", "both", "trajectories", "outcome + exit + format; on `val/` the objective of a run"),
    Metric("reward/outcome", "both", "trajectories", "1 if the answer matches, else 0; absent without answers"),
    Metric("reward/exit", "both", "trajectories", "0 exact, -0.75 early, -0.5 late; absent without a target"),
    Metric("reward/format", "both", "trajectories", "1 if every turn parsed, else 0"),
    Metric("reward/update", "both", "chunks", "+1 where the update gate equals the label, else -1; never in the total"),
    Metric("response_length/mean", "both", "turns", "sampled tokens, answer turns included"),
    Metric("response_length/clipped", "both", "turns", "share that met the length limit"),
    Metric("rollout/failed", "both", "rollouts", "number that could not be finished; they are in no mean"),
    Metric("advantage/singletons", "train_only", "groups", "share with one trajectory: its advantage is 0"),
    Metric("advantage/zero_trajectory_groups", "train_only", "groups", "share whose trajectory advantages are all 0"),
    Metric("advantage/zero_turn_cells", "train_only", "cells",
           "share of (group, chunk index) cells whose turn advantages are all 0"),
    Metric("update/skipped", "train_only", None, "optimizer steps skipped because a number was not finite"),
)  # fmt: skip

VERL_FAMILIES: tuple[str, ...] = (
    "actor", "agent_loop", "critic", "distillation", "dynamic_resource", "fully_async", "gdpo", "global_seqlen",
    "num_turns", "perf", "prompt_length", "response", "response_length", "response_length_non_aborted",
    "rollout/moe", "rollout/spec_accept_length", "rollout/spec_accept_rate", "rollout_corr", "separate_async",
    "timing_per_token_ms", "timing_s", "tool_call_counts", "training", "val-aux", "val-core",
)  # fmt: skip
"""First parts of the names that verl 0.9.1 logs; what follows them is verl's own."""

OWN_FAMILIES: tuple[str, ...] = ("warm_start",)
"""Names of ours outside design 7: the supervised phase before reinforcement learning."""

FAMILIES: tuple[str, ...] = tuple(
    sorted({"train", "val", "counts", "advantage", "update", *OWN_FAMILIES, *(f.split("/")[0] for f in VERL_FAMILIES)})
)
"""First parts of everything that W&B is sent."""

STEP_AXIS = "step"
_SHAPE = re.compile(r"[A-Za-z0-9_.@:()\-]+(/[A-Za-z0-9_.@:()\- ]+)+")


@cache
def gate_names() -> dict[str, Metric]:
    """Each full name of a gate metric, sides spelled out."""
    names: dict[str, Metric] = {}
    for metric in METRICS:
        if metric.side == "train_only":
            names[metric.name] = metric
        else:
            names |= {f"train/{metric.name}": metric, f"val/{metric.name}": metric}
    return names


def denominator_of(name: str) -> str | None:
    """What the count of a gate metric counts; None for counts, and for verl's own names."""
    metric = gate_names().get(name)
    return None if metric is None else metric.per


def denominator_in(name: str, logged: Iterable[str]) -> str | None:
    """``denominator_of`` a metric of a run that logs ``logged``: without gates a trajectory is one response."""
    per = denominator_of(name)
    if per in ("trajectories", "turns") and not any("/gates/" in other for other in logged):
        return "responses"
    return per


def check_names(names: Iterable[str]) -> None:
    """Refuses a name that no part of the program is known to log.

    Raises:
        RunFailed: with the name and the nearest known one.
    """
    for name in names:
        if name not in gate_names() and not _is_foreign(name):
            raise RunFailed(f"metric {name!r}: not a known name{_suggestion(name)}; the known ones: docs/metrics.md")


def _is_foreign(name: str) -> bool:
    if not _SHAPE.fullmatch(name):
        return False
    return any(name == family or name.startswith(f"{family}/") for family in (*VERL_FAMILIES, *OWN_FAMILIES))


def _suggestion(name: str) -> str:
    bare = f"train/{name}"
    near = [bare] if bare in gate_names() else difflib.get_close_matches(name, gate_names(), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
