"""Log-probs in one pass are those of verl's loop over tokens, with their gradients."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from verl.utils import torch_functional

from poimen_exp.verl_backend.log_probs import log_probs_of, use_log_probs_in_one_pass

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl names every engine that is not installed
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from poimen_exp.verl_backend import worker


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(7,), (2, 3)])
def test_values_and_gradients_are_verls(dtype: torch.dtype, near: float, shape: tuple[int, ...]) -> None:
    """In bfloat16 verl's are those of float32 too: autocast on a GPU widens its ``log_softmax``."""
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(*shape, 50, generator=generator) * 3).to(dtype).detach()
    labels = torch.randint(50, shape, generator=generator)
    weights = torch.randn(shape, generator=generator)
    theirs, mine = logits.float().clone().requires_grad_(), logits.clone().requires_grad_()
    verls = torch_functional.logprobs_from_logits_v2(theirs, labels)
    ours = log_probs_of(logits=mine, labels=labels)
    assert (ours.dtype, ours.shape) == (torch.float32, labels.shape)
    assert torch.allclose(ours, verls, rtol=0, atol=1e-5)
    for values in (verls, ours):
        (values * weights).sum().backward()
    assert theirs.grad is not None
    assert mine.grad is not None
    assert torch.allclose(mine.grad.float(), theirs.grad, rtol=0, atol=near)


def test_flash_attn_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    verls = torch_functional.logprobs_from_logits
    monkeypatch.setattr(transformer_impl, "logprobs_from_logits", verls)
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    use_log_probs_in_one_pass()
    assert transformer_impl.logprobs_from_logits is verls
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    use_log_probs_in_one_pass()
    assert transformer_impl.logprobs_from_logits is log_probs_of


def test_every_worker_has_them_before_it_builds_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(worker, "use_log_probs_in_one_pass", lambda: done.append("log-probs"))
    monkeypatch.setattr(worker, "never_attend_with_cudnn", lambda: done.append("attention"))
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda _: done.append("model"))
    made = object.__new__(worker.GateWorker)
    made.actor = SimpleNamespace(engine=SimpleNamespace(get_per_tensor_param=None))
    made.init_model()
    assert sorted(done[:2]) == ["attention", "log-probs"]
    assert done[2:] == ["model"]
