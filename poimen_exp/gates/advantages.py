"""The two-baseline advantage (GRU-Mem section 3.2.2; spec M5.5).

``A = alpha * A_traj + (1 - alpha) * A_turn``: a trajectory is compared with the trajectories of its group, a turn with
the turns of its group at the same chunk. Neither is divided by a standard deviation. verl's GRPO gives a group of one
its raw reward; here it is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def trajectory_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Total reward of each trajectory relative to its group.

    Args:
        rewards: [B] total rewards, one a trajectory (not one a row: longer trajectories would weigh more).
        group: [B] int64 id of the prompt whose rollouts are compared.

    Returns:
        [B] advantages; they sum to zero over every group, and are exactly 0 in a group of one or of equal rewards.
    """
    return _minus_cell_mean(rewards, group, torch.ones_like(group, dtype=torch.bool))


def turn_advantages(update_rewards: Tensor, group: Tensor, step: Tensor, valid: Tensor) -> Tensor:
    """Update reward of each turn relative to the other turns of its group at the same chunk.

    Args:
        update_rewards: [R] +1 or -1; ignored where ``valid`` is False (NaN may stand there).
        group: [R] int64 id of the prompt whose rollouts are compared; all equal for the ``batch_step`` baseline.
        step: [R] int64 index of the chunk the turn read.
        valid: [R] bool; False for answer rows, unlabelled chunks, padding and failed rollouts.

    Returns:
        [R] advantages: they sum to zero over the valid rows of every (group, step), and are 0 where a row is not valid
        or stands alone. Trajectories that stopped early simply have no row at later steps.
    """
    if update_rewards.numel() == 0:
        return update_rewards.clone()
    cell = group * (step.max() + 2) + step  # +2: answer rows may carry step -1
    return _minus_cell_mean(update_rewards, cell, valid)


def mix_advantages(trajectory: Tensor, turn: Tensor, alpha: float) -> Tensor:
    """``alpha * trajectory + (1 - alpha) * turn``, both [R]; alpha 1 and 0 give the pure term bit for bit.

    Raises:
        ValueError: alpha outside [0, 1] or NaN.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha: got {alpha}, expected a number from 0 to 1")
    if alpha == 1.0:
        return trajectory.clone()
    if alpha == 0.0:
        return turn.clone()
    return alpha * trajectory + (1.0 - alpha) * turn


def _minus_cell_mean(values: Tensor, cell: Tensor, valid: Tensor) -> Tensor:
    """[N] ``values`` minus the mean of the valid values with the same ``cell``; 0 where not valid.

    Sums run in float64. Cells whose valid values are all equal give exactly 0: rounding of the mean must not pose as
    a signal.
    """
    if values.numel() == 0:
        return values.clone()
    ids, index = torch.unique(cell, return_inverse=True)
    kept = torch.where(valid, values, 0.0).double()
    size = ids.numel()
    total = torch.zeros(size, dtype=torch.float64, device=values.device).index_add_(0, index, kept)
    count = torch.zeros_like(total).index_add_(0, index, valid.double())
    low = torch.full_like(total, torch.inf).scatter_reduce_(0, index[valid], kept[valid], "amin")
    high = torch.full_like(total, -torch.inf).scatter_reduce_(0, index[valid], kept[valid], "amax")
    mean = total / count.clamp(min=1.0)
    signal = valid & (low != high)[index]
    return torch.where(signal, kept - mean[index], 0.0).to(values.dtype)
