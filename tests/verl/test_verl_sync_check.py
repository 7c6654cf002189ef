"""Whether the sampler has the trainer's adapter, by log-probs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from poimen_exp.errors import RunFailed
from poimen_exp.verl_backend.sync_check import compare, not_empty, require_synced

BASE = torch.tensor([-1.0, -2.0, -3.0, -4.0])
EFFECT = torch.tensor([0.4, -0.2, 0.1, 0.3])
NOISE = torch.tensor([0.01, 0.02, -0.01, 0.01])


def test_a_sampler_with_the_adapter_has_a_share_near_one() -> None:
    # share = sum((effect + noise) effect) / sum(effect^2) = (0.3 + 0.002) / 0.3, where
    # sum(effect^2) = 0.16 + 0.04 + 0.01 + 0.09 = 0.3 and sum(noise effect) = 0.004 - 0.004 - 0.001 + 0.003 = 0.002.
    report = compare(BASE + EFFECT + NOISE, BASE + EFFECT, BASE)
    assert report.share == pytest.approx(0.302 / 0.3, abs=1e-6)
    assert report.sampler_trainer == pytest.approx(0.0125, abs=1e-6)
    assert report.trainer_base == pytest.approx(0.25, abs=1e-6)
    assert report.tokens == 4
    require_synced(report)


def test_a_sampler_of_the_base_has_a_share_near_zero_and_is_refused() -> None:
    report = compare(BASE + NOISE, BASE + EFFECT, BASE)
    assert report.share == pytest.approx(0.002 / 0.3, abs=1e-6)
    with pytest.raises(RunFailed, match="the sampler does not have the trainer's adapter"):
        require_synced(report)


def test_an_adapter_scaled_wrongly_in_the_sampler_is_refused() -> None:
    with pytest.raises(RunFailed, match=r"share of the adapter 2\.00"):
        require_synced(compare(BASE + 2 * EFFECT, BASE + EFFECT, BASE))


def test_an_adapter_that_changes_nothing_proves_nothing() -> None:
    with pytest.raises(RunFailed, match="does not change the trainer's log-probs"):
        require_synced(compare(BASE, BASE, BASE))


def test_nan_log_probs_are_refused() -> None:
    with pytest.raises(RunFailed, match="LoRA sync check"):
        require_synced(compare(BASE, BASE * torch.nan, BASE))


def named(*names: str) -> Iterator[tuple[str, Tensor]]:
    return iter([(name, torch.zeros(1)) for name in names])


def test_a_sync_of_no_tensors_is_stopped_before_the_sampler_sees_it() -> None:
    with pytest.raises(RuntimeError, match="weight sync: 0 tensors, expected the model's weights"):
        not_empty(named(), lora=False)
    with pytest.raises(RuntimeError, match=r"0 tensors, none of them lora_B.*fsdp2"):
        not_empty(named(), lora=True)


def test_a_lora_sync_without_the_adapter_is_stopped() -> None:
    with pytest.raises(RuntimeError, match="1 tensors, none of them lora_B"):
        not_empty(named("model.q_proj.weight"), lora=True)


def test_a_sync_that_has_tensors_passes_every_one_in_order() -> None:
    assert [name for name, _ in not_empty(named("a", "b", "c"), lora=False)] == ["a", "b", "c"]
    assert [name for name, _ in not_empty(named("q.lora_A", "q.lora_B"), lora=True)] == ["q.lora_A", "q.lora_B"]
