"""The gate check: proves, before any training or sweep, that this run's rewards teach the right gates.

Four parts, each calling the very functions that training calls: exact values on a fixture worked out by hand
(``check_fixture``), an oracle against its inverse on the run's own corpus (``check_corpus``), the fixture through the
rollout of the training loop (``check_rollout``), and one optimizer step on a toy policy (``check_step``). It runs
whatever the run's alpha is, and no configuration key skips it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from poimen_exp.gates.check_corpus import CorpusRules, check_corpus
from poimen_exp.gates.check_fixture import check_fixture
from poimen_exp.gates.check_report import GateCheckFailed, GateCheckReport, NamedCheck, Recorder
from poimen_exp.gates.check_rollout import check_rollout
from poimen_exp.gates.check_step import check_step, import_engines
from poimen_exp.gates.outcome import Matcher
from poimen_exp.gates.rewards import OnUnparsed
from poimen_exp.gates.scoring import TurnBaseline
from poimen_exp.gates.types import ReadingTask

if TYPE_CHECKING:
    from poimen_exp.solo.settings import LossSettings

__all__ = [
    "GateCheckFailed",
    "GateCheckReport",
    "GateCheckSettings",
    "NamedCheck",
    "run_gate_check",
    "write_refused_report",
]


@dataclass(frozen=True)
class GateCheckSettings:
    """What of a run decides how its corpus is scored and learnt from.

    Attributes:
        loss: the run's actor loss; None for verl's defaults.
        sample: training tasks that the corpus part reads, spread evenly over the split.
    """

    alpha: float = 0.9
    turn_baseline: TurnBaseline = "group_step"
    on_unparsed: OnUnparsed = "zero_trajectory"
    matcher: Matcher = "exact"
    loss: LossSettings | None = None
    sample: int = 200


def run_gate_check(
    tasks: Sequence[ReadingTask] | None,
    settings: GateCheckSettings = GateCheckSettings(),
) -> GateCheckReport:
    """Runs every part; call ``require()`` on what comes back.

    Args:
        tasks: the training split; None for a task without gates: the fixtures of estimators and loss only.
    """
    import_engines()
    begun = time.perf_counter()
    out = Recorder()
    check_fixture(out)
    if tasks is not None:
        rules = CorpusRules(settings.alpha, settings.turn_baseline, settings.on_unparsed, settings.matcher)
        check_corpus(tasks, rules, settings.sample, out)
    check_rollout(out)
    check_step(settings.loss, out)
    return GateCheckReport(tuple(out.checks), time.perf_counter() - begun)


def write_refused_report(report: GateCheckReport, root: Path) -> Path:
    """Writes ``<root>/refused/<time>/gate_check.json`` and returns its path; ``root`` is the ``multirun`` folder."""
    from poimen_exp.tracking.files import new_folder, write_json

    path = new_folder(root / "refused", time.strftime("%Y-%m-%d_%H-%M-%S")) / "gate_check.json"
    write_json(path, report.to_json())
    return path
