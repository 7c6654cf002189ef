"""Recomputes the advantages of a gate run from the rewards in its rollouts, whichever backend and how many GPUs it had.

    python scripts/check_advantages.py RUN

Reads ``RUN/trajectories/step_*.jsonl`` and ``RUN/resolved.yaml``; prints turns and the largest difference between
what was trained with and what the core makes of the recorded rewards on this machine; exits 1 unless it is 0.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec
import torch
from omegaconf import OmegaConf

from poimen_exp.gates.scoring import ANSWER_STEP, GateRows, TurnBaseline, row_advantages
from poimen_exp.tracking.trajectories import RolloutRecord


def difference(records: list[RolloutRecord], alpha: float, baseline: TurnBaseline) -> tuple[int, float]:
    """Turns, and the largest absolute difference of their advantages from the recorded ones."""
    place, valid, rewards, trained = [], [], [], []
    for index, record in enumerate(records):
        for turn in record.turns:
            place.append((index, record.group, ANSWER_STEP if turn.chunk is None else turn.chunk))
            valid.append(turn.update_reward is not None)
            rewards.append(turn.update_reward or 0.0)
            trained.append(math.nan if turn.advantage is None else turn.advantage)
    columns = torch.tensor(place)
    rows = GateRows(columns[:, 0], columns[:, 1], columns[:, 2], torch.tensor(valid), torch.tensor(rewards))
    totals = torch.tensor([record.rewards["total"] for record in records], dtype=torch.float32)
    group = torch.tensor([record.group for record in records])
    found = row_advantages(totals, group, rows, alpha, baseline).mixed
    return len(found), float((found - torch.tensor(trained)).abs().max())


def main(run: Path) -> int:
    cfg = OmegaConf.load(run / "resolved.yaml")
    found = []
    for file in sorted((run / "trajectories").glob("step_*.jsonl")):
        records = [msgspec.json.decode(line, type=RolloutRecord) for line in file.read_bytes().splitlines()]
        found.append(difference(records, float(cfg.alpha), cfg.advantage.turn_baseline))
    if not found:
        print(f"{run}: no rollouts of a training step; expected trajectories/step_N.jsonl")
        return 1
    worst = float(torch.tensor([most for _, most in found]).max())  # NaN if any is
    print(f"{run}: {sum(count for count, _ in found)} turns of {len(found)} steps, largest difference {worst:g}")
    return int(worst != 0.0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
