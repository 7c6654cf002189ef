"""The path from engine to learner: the fixture's readings through the task that training rolls out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from poimen_exp.gates.check_fixture import MIXED_09, READINGS
from poimen_exp.gates.check_report import Recorder
from poimen_exp.gates.check_script import STOP_ID, byte_protocol
from poimen_exp.gates.scoring import TurnBaseline
from poimen_exp.gates.types import Generation, Sampling

if TYPE_CHECKING:
    from poimen_exp.solo.engine import Request
    from poimen_exp.solo.gate_task import GateTask

_SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=128)
_ORDER = (3, 5, 1, 2, 0, 4)
"""The fixture's readings as A1, A2, A3, B1, B2, B3: two prompts of three rollouts."""


class ScriptedEngine:
    """Answers round after round as ``drive`` asks: reading ``i`` gets its next written response while it has one."""

    def __init__(self, scripts: Sequence[Sequence[str]]) -> None:
        self._scripts, self._round = scripts, 0

    def generate(self, requests: Sequence[Request], _: torch.Generator) -> list[Generation]:
        """The next response of every reading that is not through."""
        texts = [script[self._round] for script in self._scripts if len(script) > self._round]
        self._round += 1
        if len(texts) != len(requests):
            raise ValueError(f"round {self._round}: got {len(requests)} requests, expected {len(texts)}")
        ids = [(*text.encode(), STOP_ID) for text in texts]
        return [Generation(row, (-float(len(row)),) * len(row), clipped=False) for row in ids]


def check_rollout(out: Recorder) -> None:
    """Every row that the learner gets: sampled ids, their log-probs, its group and its advantage belong together."""
    for baseline in MIXED_09:
        with out.section(f"rollout/{baseline}"):
            _check_rows(out, baseline)


def _check_rows(out: Recorder, baseline: TurnBaseline) -> None:
    batch = _task(baseline).rollout([0, 1], step=1)
    wanted = _expected(baseline)
    out.equal("rows", len(batch.rows), len(wanted))
    got, expected, foreign = [], [], 0
    for place, (row, name) in enumerate(zip(batch.rows, batch.names, strict=True)):
        text, group, advantage = wanted[name]
        same = row.response == (*text.encode(), STOP_ID) and row.rollout_log_probs[0] == -len(row.response)
        foreign += not (same and int(batch.group[place]) == group)
        got.append(float(batch.advantages[place]))
        expected.append(advantage)
    out.equal("rows with ids, log-probs or group of another row", foreign, 0)
    out.equal("mix at alpha 0.9 of every row", got, expected)
    out.equal("readings started and failed", (batch.attempted, batch.failed), (6, 0))


def _expected(baseline: TurnBaseline) -> dict[str, tuple[str, int, float]]:
    """Response, group and advantage of each row, by the name that messages give it."""
    starts = [sum(len(reading[2]) for reading in READINGS[:place]) for place in range(len(READINGS))]
    out = {}
    for number, place in enumerate(_ORDER):
        task, _, responses = READINGS[place]
        for turn, text in enumerate(responses):
            kind = "answer" if turn == len(responses) - 1 else f"chunk {turn}"
            name = f"task {task.task_id}, sample {number % 3}, {kind}"
            out[name] = (text, number // 3, MIXED_09[baseline][starts[place] + turn])
    return out


def _task(baseline: TurnBaseline) -> GateTask:
    from poimen_exp.solo.gate_task import GateTask
    from poimen_exp.solo.settings import GateSettings, RolloutSettings

    gates = GateSettings(
        layout="chunk_first",
        wording="terse",
        memory_tokens=64,
        on_unparsed="zero_trajectory",
        matcher="exact",
        turn_baseline=baseline,
        warm_start_steps=0,
        warm_start_lr=0.0,
        warm_start_batch=0,
    )
    rollout = RolloutSettings(
        train=_SAMPLING,
        val=_SAMPLING,
        group_size=3,
        val_group_size=1,
        max_prompt_length=256,
        max_rows=6,
        max_failed=0.0,
    )
    tasks = [READINGS[_ORDER[0]][0], READINGS[_ORDER[3]][0]]
    engine: Any = ScriptedEngine([READINGS[place][2] for place in _ORDER])
    device = torch.device("cpu")
    return GateTask(cast(Any, tasks), [], byte_protocol(), engine, gates, rollout, 0.9, 0, device)
