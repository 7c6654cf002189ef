"""The check in front of a run of prompts: its estimator and loss, on fixtures worked out by hand, and one real step.

It calls the very functions that training calls. Five responses in two groups, of one and two tokens, rows mixed:

| row | group | tokens | score | values |
|-----|-------|--------|-------|--------|
| A   | 0     | 2      | 1     | 1, 2   |
| B   | 1     | 1      | 1     | 1      |
| C   | 0     | 1      | 3     | 1      |
| D   | 1     | 2      | 3     | 0, 1   |
| E   | 1     | 1      | 5     | 2      |

Group 0: mean 2, standard deviation sqrt 2 (over n - 1). Group 1: mean 3, standard deviation 2. gamma = lam = 1/2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from poimen_exp.gates.check_report import GateCheckReport, Recorder
from poimen_exp.gates.check_step import check_rise, check_step, import_engines, plain_loss

if TYPE_CHECKING:
    from poimen_exp.solo.settings import AlgorithmSettings, CriticSettings, LossSettings, SoloSettings

_GROUP, _SCORES, _LENGTHS = (0, 1, 0, 1, 1), (1.0, 1.0, 3.0, 3.0, 5.0), (2, 1, 1, 2, 1)
_VALUES = ((1.0, 2.0), (1.0,), (1.0,), (0.0, 1.0), (2.0,))
_LOG_RATIOS = ((0.2, -0.4), (0.0,), (0.0,), (0.0, 0.0), (1.0,))
_HALF = math.sqrt(0.5)

# Token by token in the order A, A, B, C, D, D, E.
ADVANTAGES: Mapping[str, tuple[float, ...]] = {
    "grpo": (-_HALF, -_HALF, -1.0, _HALF, 0.0, 0.0, 1.0),
    "dr_grpo": (-1.0, -1.0, -2.0, 1.0, 0.0, 0.0, 2.0),
    # Against the mean of the others: 1 - 3; 1 - 4; 3 - 1; 3 - 3; 5 - 2.
    "rloo": (-2.0, -2.0, -3.0, 2.0, 0.0, 0.0, 3.0),
    # Returns 1/2, 1, 1, 3, 3/2, 3, 5: mean 15/7, variance 215/84 over 6.
    "reinforce_plus_plus": (-1.026881, -0.714352, -0.714352, 0.535764, -0.401823, 0.535764, 1.785880),
    # -1/4, -1, 0, 2, 1, 2, 3 before whitening: mean 27/28, variance 703/336 over 6.
    "gae": (-0.839485, -1.357990, -0.666650, 0.716031, 0.024691, 0.716031, 1.407372),
}
_GAE_RETURNS = (0.75, 1.0, 1.0, 3.0, 1.0, 3.0, 5.0)
_REWARDS_LESS_KL = (-0.1, 1.2, 1.0, 3.0, 0.0, 3.0, 4.5)


def check_learning(settings: SoloSettings) -> GateCheckReport:
    """Runs every part; call ``require()`` on what comes back."""
    import_engines()
    begun = time.perf_counter()
    out = Recorder()
    with out.section("estimator"):
        check_estimator(settings.algorithm, out)
    with out.section("estimator/kl"):
        _check_kl(out)
    if settings.critic is not None:
        with out.section("critic"):
            _check_value_loss(settings.critic, out)
    check_step(settings.loss, out)
    with out.section("learning"):
        _check_learning(settings.algorithm, settings.loss, out)
    return GateCheckReport(tuple(out.checks), time.perf_counter() - begun)


def check_estimator(algorithm: AlgorithmSettings, out: Recorder) -> None:
    """Exact advantages of the run's estimator, at gamma = lam = 1/2."""
    import torch

    from poimen_exp.solo.estimators import estimate

    fixture = replace(algorithm, gamma=0.5, lam=0.5, use_kl_in_reward=False)
    values = tuple(torch.tensor(row) for row in _VALUES) if algorithm.adv_estimator == "gae" else None
    found = estimate(torch.tensor(_SCORES), torch.tensor(_GROUP), _LENGTHS, fixture, values=values)
    name: str = algorithm.adv_estimator
    if name == "grpo" and not algorithm.norm_adv_by_std_in_grpo:
        name = "dr_grpo"
    out.equal(f"{name}: advantages", torch.cat(found.advantages).tolist(), ADVANTAGES[name], tolerance=5e-6)
    if values is not None:
        out.equal("gae: returns", torch.cat(found.returns).tolist(), _GAE_RETURNS)


def _check_kl(out: Recorder) -> None:
    """Scores less half the log ratio: A has -0.1 and 1 + 0.2, E has 5 - 0.5."""
    import torch

    from poimen_exp.solo.estimators import estimate
    from poimen_exp.solo.settings import AlgorithmSettings

    settings = AlgorithmSettings("rloo", use_kl_in_reward=True, kl_penalty="kl", kl_coef=0.5)
    mine = tuple(torch.tensor(row) for row in _LOG_RATIOS)
    base = tuple(torch.zeros(len(row)) for row in _LOG_RATIOS)
    found = estimate(torch.tensor(_SCORES), torch.tensor(_GROUP), _LENGTHS, settings, mine, base)
    out.equal("rewards less KL", torch.cat(found.rewards).tolist(), _REWARDS_LESS_KL)


def _check_value_loss(critic: CriticSettings, out: Recorder) -> None:
    """Old values 0, clipped to 1/2: at prediction 2 and returns 1 and 3 half of max(1, 1/4) and of max(1, 25/4)."""
    import torch

    from poimen_exp.solo.critic import ValueBatch, value_loss
    from poimen_exp.solo.losses import MiniBatchSize

    settings = replace(critic, cliprange_value=0.5, loss_agg_mode="token-mean")
    mask = torch.tensor([[True, True, False]])
    batch = ValueBatch(torch.tensor([[2.0, 2.0, 9.0]]), torch.tensor([[1.0, 3.0, 0.0]]), torch.zeros(1, 3), mask)
    out.equal("clipped value loss", value_loss(batch, MiniBatchSize(2, 1), settings)[0].item(), (0.5 + 3.125) / 2)


def _check_learning(algorithm: AlgorithmSettings, loss: LossSettings, out: Recorder) -> None:
    """Two groups of one rewarded and one other response of one token: a step raises what was rewarded."""
    import torch

    from poimen_exp.solo.estimators import estimate

    scores, group = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    one = tuple(torch.zeros(1) for _ in range(4))
    advantages = estimate(scores, group, (1, 1, 1, 1), algorithm, one, one, one).advantages
    for name, chosen in (("verl's loss", plain_loss()), ("the run's loss", loss)):
        check_rise(out, name, chosen, advantages)
