"""Advantages of single-turn responses, by verl's own functions (verl 0.9.1, ``verl.trainer.ppo.core_algos``).

T response tokens of R rows; a score is one number a response and lies on its last token, as verl lays it. Rewards are
scores less KL, token by token. Every estimator takes padded [R, T] and gives [R, T]; padding is 0 before and after.

| ``adv_estimator``       | ``compute_...``                        | advantage of a token                 |
|-------------------------|----------------------------------------|--------------------------------------|
| ``gae``                 | ``gae_advantage_return``               | sum of (gamma lam)^k delta, whitened |
| ``grpo``                | ``grpo_outcome_advantage``             | (R - mean) / (std + 1e-6) of a group |
| ``grpo``, std off       | the same                               | R - mean of its group (Dr. GRPO)     |
| ``rloo``                | ``rloo_outcome_advantage``             | R - mean of the others of its group  |
| ``reinforce_plus_plus`` | ``reinforce_plus_plus_outcome_advantage`` | sum of gamma^k r, whitened        |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from poimen_exp.errors import RunFailed
from poimen_exp.solo.ragged import Ragged, padded, unpadded
from poimen_exp.solo.settings import AlgorithmSettings, Estimator


@dataclass(frozen=True)
class Estimate:
    """What a batch is learnt from.

    Attributes:
        rewards: of each token: the score on the last one, less KL.
        advantages: the actor's weights.
        returns: the critic's targets; equal to the advantages where there is no critic.
        kl: of each token to the reference, without its coefficient; None where it is not in the reward.
        singletons: groups with one response left, in ``group`` order of appearance; their advantages are 0.
    """

    rewards: Ragged
    advantages: Ragged
    returns: Ragged
    kl: Ragged | None
    singletons: int


@dataclass(frozen=True)
class TokenRewards:
    """Padded input of an estimator.

    Attributes:
        rewards: [R, T] token rewards.
        mask: [R, T] float, 1 on response tokens.
        group: [R] prompt of each row.
        values: [R, T] of the critic; None without one.
    """

    rewards: Tensor
    mask: Tensor
    group: np.ndarray
    values: Tensor | None


def estimate(
    scores: Tensor,
    group: Tensor,
    lengths: Sequence[int],
    settings: AlgorithmSettings,
    log_probs: Ragged | None = None,
    ref_log_probs: Ragged | None = None,
    values: Ragged | None = None,
) -> Estimate:
    """Rewards, advantages and returns of R responses.

    A group that failed rollouts left with one response has nothing to be compared with: its advantages are 0, where
    verl's grpo and rloo would weigh it with its raw score.

    Args:
        scores: [R] one a response.
        group: [R] int64 prompt of each response.
        lengths: [R] tokens of each response, 1 or more.
        log_probs: of the policy that sampled, by the trainer; needed for KL in the reward.
        ref_log_probs: of the reference.
        values: of the critic; needed for gae.
    """
    kl = _kl(settings, log_probs, ref_log_probs)
    rewards = _token_rewards(scores, lengths, kl, settings.kl_coef)
    token_rewards, mask = padded(rewards)
    inputs = TokenRewards(token_rewards, mask.float(), group.numpy(), None if values is None else padded(values)[0])
    advantages, returns = ESTIMATORS[settings.adv_estimator](inputs, settings)
    sizes = Counter(group.tolist())
    singletons = 0
    if settings.adv_estimator in GROUPED:
        singletons = sum(size == 1 for size in sizes.values())
        alone = torch.tensor([sizes[owner] == 1 for owner in group.tolist()])
        advantages = torch.where(alone[:, None], 0.0, advantages)
    return Estimate(rewards, unpadded(advantages, mask), unpadded(returns, mask), kl, singletons)


def _kl(settings: AlgorithmSettings, log_probs: Ragged | None, ref_log_probs: Ragged | None) -> Ragged | None:
    if not settings.use_kl_in_reward:
        return None
    from verl.trainer.ppo.core_algos import kl_penalty

    assert log_probs is not None
    assert ref_log_probs is not None
    pairs = zip(log_probs, ref_log_probs, strict=True)
    return tuple(kl_penalty(mine.cpu(), ref.cpu(), settings.kl_penalty) for mine, ref in pairs)


def _token_rewards(scores: Tensor, lengths: Sequence[int], kl: Ragged | None, coefficient: float) -> Ragged:
    out = []
    for place, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        row = torch.zeros(length)
        row[-1] = score
        out.append(row if kl is None else row - coefficient * kl[place])
    return tuple(out)


def _gae(inputs: TokenRewards, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns A + V before whitening."""
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    assert inputs.values is not None
    _require_two_tokens(inputs)
    advantages, returns = compute_gae_advantage_return(
        token_level_rewards=inputs.rewards,
        values=inputs.values,
        response_mask=inputs.mask,
        gamma=settings.gamma,
        lam=settings.lam,
    )
    return advantages, returns


def _grpo(inputs: TokenRewards, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """The sum of a response's rewards against its group's; the standard deviation divides by n - 1."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    advantages, returns = compute_grpo_outcome_advantage(
        token_level_rewards=inputs.rewards,
        response_mask=inputs.mask,
        index=inputs.group,
        norm_adv_by_std_in_grpo=settings.norm_adv_by_std_in_grpo,
    )
    return advantages, returns


def _rloo(inputs: TokenRewards, _: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """R n / (n - 1) - mean n / (n - 1): the response against the mean of the others."""
    from verl.trainer.ppo.core_algos import compute_rloo_outcome_advantage

    advantages, returns = compute_rloo_outcome_advantage(
        token_level_rewards=inputs.rewards, response_mask=inputs.mask, index=inputs.group
    )
    return advantages, returns


def _reinforce_plus_plus(inputs: TokenRewards, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Discounted returns of every token, whitened over all tokens of the batch."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import compute_reinforce_plus_plus_outcome_advantage

    _require_two_tokens(inputs)
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(
        token_level_rewards=inputs.rewards, response_mask=inputs.mask, config=AlgoConfig(gamma=settings.gamma)
    )
    return advantages, returns


def _require_two_tokens(inputs: TokenRewards) -> None:
    if inputs.mask.sum() < 2:
        raise RunFailed("advantages: got a batch of one response token, expected two or more to whiten over")


ESTIMATORS: Mapping[Estimator, Callable[[TokenRewards, AlgorithmSettings], tuple[Tensor, Tensor]]] = {
    "gae": _gae,
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
}
GROUPED: frozenset[Estimator] = frozenset({"grpo", "rloo"})
"""Estimators that compare the responses of one prompt."""
