"""Supervised steps on constructed turns, for a base model that rarely writes the turn format by itself."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from poimen_exp.errors import Refused, RunFailed
from poimen_exp.gates.protocol import GateProtocol, parse_turn
from poimen_exp.gates.types import Prompt, ReadingTask
from poimen_exp.quickstart.turns import TurnPair, constructed_turns, parse_verdict
from poimen_exp.solo.forward import token_stats
from poimen_exp.solo.policy import Policy
from poimen_exp.solo.rows import Row, micro_batches, pack
from poimen_exp.solo.seeds import stream_seed
from poimen_exp.solo.settings import GateSettings

_MOST_SKIPS = 3
"""Steps in a row without a finite loss and gradient that end a run, as in its reinforcement learning."""
_TURNS_OF_A_KIND = 2
"""Of each task drawn: few, so that a batch holds many tasks."""


@dataclass(frozen=True)
class WarmStartReport:
    """Mean negative log-likelihood per response token of the first and of the last step, steps skipped, seconds."""

    first_loss: float
    last_loss: float
    skipped: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """As they are logged."""
        return {
            "warm_start/loss/first": self.first_loss,
            "warm_start/loss/last": self.last_loss,
            "warm_start/skipped": float(self.skipped),
            "timing_s/warm_start": self.seconds,
        }


def warm_start(
    policy: Policy,
    protocol: GateProtocol,
    tasks: Sequence[ReadingTask],
    gates: GateSettings,
    pad_id: int,
    token_budget: int,
    seed: int,
    say: Callable[[str], None],
) -> WarmStartReport | None:
    """Teaches the turn format to the adapter; gates in the constructed turns are random, so that what the gates learn
    comes from the reinforcement learning that follows. None if ``gates.warm_start_steps`` is 0.
    """
    if gates.warm_start_steps == 0:
        return None
    begun = time.perf_counter()
    rng = random.Random(stream_seed(seed, "warm_start"))
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=gates.warm_start_lr, weight_decay=0.0)
    losses, skipped, lost = [], 0, 0
    for step in range(gates.warm_start_steps):
        for group in optimizer.param_groups:  # linear decay: the last steps settle what the first ones stirred up
            group["lr"] = gates.warm_start_lr * (1.0 - step / gates.warm_start_steps)
        rows = balanced_rows(protocol, tasks, gates.warm_start_batch, rng)
        loss, finite = _supervised_step(policy, optimizer, rows, pad_id, token_budget)
        losses.append(loss)
        lost = 0 if finite else lost + 1
        if lost:
            skipped += 1
            say(f"warm start {step + 1}/{gates.warm_start_steps}: loss or gradient is not finite, step skipped")
        if lost == _MOST_SKIPS:
            raise RunFailed(f"warm start: {_MOST_SKIPS} steps in a row without a finite loss and gradient")
        if (step + 1) % 10 == 0 or step + 1 == gates.warm_start_steps:
            say(f"warm start {step + 1}/{gates.warm_start_steps}: loss {losses[-1]:.3f} nats per response token")
    policy.sync()
    return WarmStartReport(losses[0], losses[-1], skipped, time.perf_counter() - begun)


def balanced_rows(protocol: GateProtocol, tasks: Sequence[ReadingTask], count: int, rng: random.Random) -> list[Row]:
    """``count`` constructed turns, half of them answers and chunks with evidence wherever tasks have both kinds.

    Most chunks of a long document hold nothing: drawn evenly, a verdict of "nothing" would nearly always be right.
    """
    rows: list[Row] = []
    empty = 0
    while len(rows) < count:
        turns = constructed_turns(tasks[rng.randrange(len(tasks))], protocol, rng, gates="random")
        empty = 0 if turns else empty + 1
        if empty > len(tasks):
            raise Refused(
                f"gates.warm_start.steps: none of {empty} tasks gave a turn to learn from; expected labelled chunks "
                "or answers; set gates.warm_start.steps=0"
            )
        kinds: dict[bool, list[TurnPair]] = {True: [], False: []}
        for turn in turns:
            kinds[_tells(protocol, turn)].append(turn)
        for kind in kinds.values():
            for prompt_ids, response_ids in rng.sample(kind, min(_TURNS_OF_A_KIND, len(kind))):
                rows.append(Row(Prompt(tuple(prompt_ids), 0), tuple(response_ids), ()))
    return rows[:count]


def _tells(protocol: GateProtocol, turn: TurnPair) -> bool:
    """Whether a turn is an answer, or that of a chunk with something new."""
    gate = parse_turn(protocol.text_of(turn[1]))
    found = None if gate is None else parse_verdict(gate.think)
    return found is None or found[0]


def _supervised_step(
    policy: Policy, optimizer: torch.optim.Optimizer, rows: Sequence[Row], pad_id: int, token_budget: int
) -> tuple[float, bool]:
    """Loss in nats per response token, and whether the adapter moved: not if loss or gradient is not finite."""
    total = sum(len(row.response) for row in rows)
    optimizer.zero_grad(set_to_none=True)
    loss_sum = 0.0
    for places in micro_batches(rows, range(len(rows)), token_budget):
        packed = pack([rows[place] for place in places], pad_id, policy.device)
        with policy.autocast():
            loss = -token_stats(policy.model, packed, 1.0).log_probs.sum() / total
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += float(loss.detach())
    norm = float(torch.nn.utils.clip_grad_norm_(list(policy.trainable().values()), 1.0))
    finite = math.isfinite(loss_sum) and math.isfinite(norm)
    if finite:
        optimizer.step()
    return loss_sum, finite
