"""How often the verdict that a warm-started model thinks before its gates is right: what gates can learn to follow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from poimen_exp.corpus.split import Side
from poimen_exp.gates.protocol import GateProtocol, format_turn, parse_turn
from poimen_exp.gates.types import GateTurn, Prompt, ReadingTask
from poimen_exp.quickstart.turns import constructed_turns, parse_verdict, response_ids, verdict
from poimen_exp.solo.forward import token_stats
from poimen_exp.solo.policy import Policy
from poimen_exp.solo.rows import Row, micro_batches, pack
from poimen_exp.solo.seeds import stream_seed


@dataclass(frozen=True)
class VerdictAccuracy:
    """Right verdicts and chunks of both kinds."""

    right_with_evidence: int
    with_evidence: int
    right_without: int
    without: int

    def line(self) -> str:
        """Shares with their denominators."""
        kinds = (("with", self.right_with_evidence, self.with_evidence), ("without", self.right_without, self.without))
        shares = [f"{right / count:.2f} of {count} {name} evidence" for name, right, count in kinds if count]
        return ", ".join(shares) or "no labelled chunk"

    def metrics(self, side: Side) -> tuple[dict[str, float], dict[str, int]]:
        """As they are logged, with their denominators; a kind that has no chunk is absent."""
        kinds = {
            "evidence_present": (self.right_with_evidence, self.with_evidence),
            "evidence_free": (self.right_without, self.without),
        }
        found = {f"warm_start/verdict/{side}/{name}": pair for name, pair in kinds.items() if pair[1]}
        values = {name: right / count for name, (right, count) in found.items()}
        return values, {name: count for name, (_, count) in found.items()}


@torch.no_grad()
def verdict_accuracy(
    policy: Policy, protocol: GateProtocol, tasks: Sequence[ReadingTask], pad_id: int, token_budget: int, seed: int
) -> VerdictAccuracy:
    """Reads every labelled chunk of ``tasks`` once, with a memory that random gates have left, and asks which of
    "new" and "nothing" the model finds likelier where ``<think>`` begins.

    Args:
        tasks: held-out ones, for what gates can learn that is not by heart.
        token_budget: padded tokens of a forward.
    """
    rng = random.Random(stream_seed(seed, "verdicts"))
    asked: list[tuple[bool, int]] = []
    rows: list[Row] = []
    for task in tasks:
        for prompt, response in constructed_turns(task, protocol, rng, gates="random"):
            gate = parse_turn(protocol.text_of(response))
            said = None if gate is None else parse_verdict(gate.think)
            if gate is None or said is None:  # an answer turn
                continue
            both = [_response(gate, new, said[1], protocol) for new in (True, False)]
            asked.append((said[0], next(at for at, (a, b) in enumerate(zip(*both, strict=False)) if a != b)))
            rows += [Row(Prompt(tuple(prompt), 0), ids, ()) for ids in both]
    log_probs = torch.zeros(len(rows))
    for places in micro_batches(rows, range(len(rows)), token_budget):
        with policy.autocast():
            found = token_stats(policy.model, pack([rows[place] for place in places], pad_id, policy.device), 1.0)
        columns = torch.tensor([asked[place // 2][1] for place in places], device=policy.device)
        log_probs[places] = found.log_probs.gather(1, columns[:, None])[:, 0].float().cpu()
    says_new = (log_probs[0::2] > log_probs[1::2]).tolist()
    right = [(is_new, said == is_new) for (is_new, _), said in zip(asked, says_new, strict=True)]
    evidence = [good for is_new, good in right if is_new]
    empty = [good for is_new, good in right if not is_new]
    return VerdictAccuracy(sum(evidence), len(evidence), sum(empty), len(empty))


def _response(gate: GateTurn, new: bool, complete: bool, protocol: GateProtocol) -> tuple[int, ...]:
    return response_ids(format_turn(replace(gate, think=verdict(new, complete))), protocol.codec)
