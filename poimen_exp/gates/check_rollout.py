"""The path from engine to learner: the fixture's readings through the task that training rolls out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from poimen_exp.gates.check_fixture import MIXED_09, READINGS
from poimen_exp.gates.check_report import Recorder
from poimen_exp.gates.check_script import STOP_ID, byte_protocol
from poimen_exp.gates.scoring import TurnBaseline
from poimen_exp.gates.types import Generation, Sampling

if TYPE_CHECKING:
    from poimen_exp.solo.drive import Answer
    from poimen_exp.solo.engine import Request
    from poimen_exp.solo.gate_task import GateTask

_SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=128)
_ORDER = (3, 5, 1, 2, 0, 4)
"""The fixture's readings as A1, A2, A3, B1, B2, B3: two prompts of three rollouts."""


class ScriptedEngine:
    """Answers round after round: reading ``i`` gets its next written response while it asks."""

    def __init__(self, scripts: Sequence[Sequence[str]]) -> None:
        self._scripts = [list(script) for script in scripts]

    def serve(self, requests: Mapping[int, Request], follow: Answer, _: torch.Generator) -> None:
        """The next response of whoever asks, until nobody does."""
        asking = list(requests)
        while asking:
            asking = [place for place in asking if follow(place, self._next(place)) is not None]
        if any(self._scripts):
            raise ValueError("got readings that ended early, expected every written response to be asked for")

    def _next(self, place: int) -> Generation:
        ids = (*self._scripts[place].pop(0).encode(), STOP_ID)
        return Generation(ids, (-float(len(ids)),) * len(ids), clipped=False)


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
        got += batch.advantages[place].tolist()
        expected += [advantage] * len(row.response)
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
