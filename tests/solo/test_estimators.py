"""Advantages against verl's own functions called on padded tensors, and against numbers worked out by hand."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poimen_exp.errors import RunFailed
from poimen_exp.gates.check_report import Recorder
from poimen_exp.solo.check import check_estimator
from poimen_exp.solo.estimators import Estimate, estimate
from poimen_exp.solo.ragged import Ragged
from poimen_exp.solo.settings import AlgorithmSettings, Estimator

GAE = AlgorithmSettings("gae", gamma=0.9, lam=0.8)
GRPO = AlgorithmSettings("grpo")
DR_GRPO = replace(GRPO, norm_adv_by_std_in_grpo=False)
RLOO = AlgorithmSettings("rloo")
REINFORCE = AlgorithmSettings("reinforce_plus_plus", gamma=0.9)
ALL = {"gae": GAE, "grpo": GRPO, "dr_grpo": DR_GRPO, "rloo": RLOO, "reinforce_plus_plus": REINFORCE}

LENGTHS = (3, 1, 4, 2, 2, 5)
GROUP = (0, 1, 0, 1, 0, 1)
SCORES = (1.0, 0.5, 0.0, -1.0, 2.0, 0.25)


def some(seed: int, lengths: Sequence[int] = LENGTHS) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(length, generator=generator) for length in lengths)


def found(algorithm: AlgorithmSettings) -> Estimate:
    return estimate(torch.tensor(SCORES), torch.tensor(GROUP), LENGTHS, algorithm, some(1), some(2), some(3))


def verls(algorithm: AlgorithmSettings) -> tuple[Tensor, Tensor, Tensor]:
    """verl's driver on the same rows, padded to seven tokens: advantages, returns, mask."""
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage

    mask = (torch.arange(7)[None] < torch.tensor(LENGTHS)[:, None]).long()

    def pad(rows: Ragged) -> Tensor:
        return torch.stack([torch.nn.functional.pad(row, (0, 7 - len(row))) for row in rows])

    scores = torch.zeros(6, 7)
    scores[torch.arange(6), torch.tensor(LENGTHS) - 1] = torch.tensor(SCORES)
    data = DataProto.from_dict(
        tensors={
            "token_level_scores": scores,
            "token_level_rewards": scores,
            "response_mask": mask,
            "old_log_probs": pad(some(1)),
            "ref_log_prob": pad(some(2)),
            "values": pad(some(3)),
        },
        non_tensors={"uid": np.array(GROUP, dtype=object)},
    )
    if algorithm.use_kl_in_reward:
        data, _ = apply_kl_penalty(data, FixedKLController(algorithm.kl_coef), algorithm.kl_penalty)
    config: Any = AlgoConfig(gamma=algorithm.gamma, lam=algorithm.lam, adv_estimator=algorithm.adv_estimator)
    data = compute_advantage(
        data,
        algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=config,
    )
    return data.batch["advantages"], data.batch["returns"], mask.bool()


@pytest.fixture(scope="module")
def driver() -> None:
    """Loads verl's trainer, with the warnings of its imports silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl.trainer.ppo.ray_trainer  # noqa: F401


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kl", [None, "kl", "abs", "mse", "low_var_kl"])
def test_advantages_and_returns_are_those_of_verls_driver(name: str, kl: str | None) -> None:
    algorithm = ALL[name]
    if kl is not None:
        algorithm = replace(algorithm, use_kl_in_reward=True, kl_penalty=kl, kl_coef=0.3)
    advantages, returns, mask = verls(algorithm)
    mine = found(algorithm)
    assert torch.allclose(torch.cat(mine.advantages), advantages[mask], atol=1e-6)
    assert torch.allclose(torch.cat(mine.returns), returns[mask], atol=1e-6)
    assert float(torch.cat(mine.advantages).abs().max()) > 0.1
    assert [len(row) for row in mine.advantages] == list(LENGTHS)


@pytest.mark.parametrize("name", ALL)
def test_hand_worked_advantages(name: str) -> None:
    out = Recorder()
    with out.section("x"):
        check_estimator(ALL[name], out)
    assert [check.line() for check in out.checks if not check.passed] == []
    assert len(out.checks) >= 1


@pytest.mark.parametrize("algorithm", [GRPO, DR_GRPO, RLOO], ids=["grpo", "dr_grpo", "rloo"])
def test_a_group_that_lost_its_others_teaches_nothing_and_is_counted(algorithm: AlgorithmSettings) -> None:
    """verl would weigh it with its raw score, 5."""
    got = estimate(torch.tensor([5.0, 1.0, 0.0]), torch.tensor([0, 1, 1]), (2, 1, 1), algorithm)
    assert got.advantages[0].tolist() == [0.0, 0.0]
    assert got.advantages[1].item() > 0
    assert got.singletons == 1


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_one_token_cannot_be_whitened(name: Estimator) -> None:
    with pytest.raises(RunFailed, match="one response token"):
        estimate(torch.tensor([1.0]), torch.tensor([0]), (1,), ALL[name], values=(torch.zeros(1),))


def test_the_score_lies_on_the_last_token_of_its_own_response() -> None:
    got = found(REINFORCE)
    assert got.kl is None  # log-probs are given, for the loss
    assert [row.nonzero().flatten().tolist() for row in got.rewards] == [[2], [0], [], [1], [1], [4]]
    # Undiscounted to the last token, 0.9 a token before it: 2 x 0.9 and 2 for the fifth response.
    assert got.returns[4].tolist() == pytest.approx([1.8, 2.0])


_GROUPS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.floats(-3, 3, width=32)), min_size=2, max_size=9)


@given(_GROUPS)
@settings(max_examples=40, deadline=None)
def test_grouped_advantages_of_a_group_sum_to_zero(rows: list[tuple[int, int, float]]) -> None:
    group, lengths, scores = zip(*rows, strict=True)
    for algorithm in (DR_GRPO, RLOO):
        got = estimate(torch.tensor(scores), torch.tensor(group), lengths, algorithm)
        for owner in set(group):
            total = sum(float(got.advantages[place][0]) for place, of in enumerate(group) if of == owner)
            assert total == pytest.approx(0.0, abs=1e-4)


@given(st.permutations(range(6)))
@settings(max_examples=15, deadline=None)
def test_the_order_of_rows_changes_nothing(order: list[int]) -> None:
    for algorithm in ALL.values():
        straight = found(algorithm)
        mixed = estimate(
            torch.tensor([SCORES[place] for place in order]),
            torch.tensor([GROUP[place] for place in order]),
            [LENGTHS[place] for place in order],
            algorithm,
            values=tuple(some(3)[place] for place in order),
        )
        for row, place in zip(mixed.advantages, order, strict=True):
            assert torch.allclose(row, straight.advantages[place], atol=1e-5)
