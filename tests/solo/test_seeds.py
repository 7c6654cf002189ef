"""Random streams by place, and the order of prompts."""

from __future__ import annotations

import pytest
import torch

from poimen_exp.solo.seeds import epoch_order, prompts_of_step, stream, stream_seed


def test_a_stream_depends_on_its_place_and_on_nothing_drawn_before() -> None:
    first = torch.rand(3, generator=stream(7, "rollout", 3))
    torch.rand(100)
    assert torch.equal(torch.rand(3, generator=stream(7, "rollout", 3)), first)
    others = [stream(7, "rollout", 4), stream(8, "rollout", 3), stream(7, "val", 3)]
    assert not any(torch.equal(torch.rand(3, generator=other), first) for other in others)


def test_stream_seeds_are_known_numbers() -> None:
    # First 8 bytes of SHA-256 of "0/rollout/1", shifted right by one: pins runs across versions.
    import hashlib

    digest = hashlib.sha256(b"0/rollout/1").hexdigest()
    assert stream_seed(0, "rollout", 1) == int(digest[:16], 16) // 2
    assert stream_seed(0, "rollout", 1) < 2**63


def test_an_epoch_is_a_permutation_and_the_next_one_another() -> None:
    first, second = epoch_order(20, 3, 0, True), epoch_order(20, 3, 1, True)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert epoch_order(20, 3, 0, False) == epoch_order(20, 3, 5, False) == list(range(20))


@pytest.mark.filterwarnings("default")  # of torchdata's import
def test_the_order_is_that_of_the_sampler_that_verl_uses() -> None:
    """verl 0.9.1, trainer/ppo/utils.py: torchdata's RandomSampler with a generator seeded by ``data.seed``.

    torch's own RandomSampler draws once more at the end of an epoch, so that its second epoch is another.
    """
    from torchdata.stateful_dataloader.sampler import RandomSampler

    sampler = RandomSampler(range(9), generator=torch.Generator().manual_seed(5))
    for epoch in range(3):
        assert list(sampler) == epoch_order(9, 5, epoch, True)


@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_go_through_an_epoch_and_leave_its_incomplete_batch_out(shuffle: bool) -> None:
    # 7 prompts, 3 a step: 2 steps an epoch, the seventh prompt of the order is left out.
    first = prompts_of_step(7, 3, 0, 1, shuffle) + prompts_of_step(7, 3, 0, 2, shuffle)
    assert first == epoch_order(7, 0, 0, shuffle)[:6]
    assert prompts_of_step(7, 3, 0, 3, shuffle) == epoch_order(7, 0, 1, shuffle)[:3]
