"""The policy that KL is measured against: where nothing is named, and a named adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poimen_exp.adapters.export import export_adapter
from poimen_exp.adapters.manifest import AdapterInfo
from poimen_exp.errors import Refused
from poimen_exp.solo.policy import Policy
from poimen_exp.solo.reference import named_adapter

from .prompt_support import run, small_settings
from .support import plain_log_probs, policy, some_rows, updater


def exported(of: Policy, base: Path, folder: Path) -> Path:
    info = AdapterInfo(base, "float32", None, None, 0, 8, 8, "x", "0" * 64, None, "r", 0)
    return export_adapter(of.model, folder, info)


def test_the_frozen_base_is_the_model_without_its_adapter(tiny_folder: Path) -> None:
    made, item = policy(tiny_folder), some_rows()[2]
    with torch.no_grad(), made.model.disable_adapter():
        base = plain_log_probs(made.model, item)
    with torch.no_grad(), made.using(made.base_state()):
        assert torch.allclose(plain_log_probs(made.model, item), base, atol=1e-6)
    with torch.no_grad():
        assert not torch.allclose(plain_log_probs(made.model, item), base, atol=1e-3)


def test_a_named_adapter_is_put_in_for_its_own_forward_only(tiny_folder: Path, tmp_path: Path) -> None:
    other = policy(tiny_folder)
    with torch.no_grad():
        for value in other.trainable().values():
            value.add_(0.1)
        wanted = [plain_log_probs(other.model, item) for item in some_rows()]
    folder = exported(other, tiny_folder, tmp_path / "adapter")
    made = policy(tiny_folder)
    mine = made.state()
    role = updater(made)
    role._reference = named_adapter(made, folder)
    got = role.reference_log_probs(some_rows())
    for value, plain in zip(got, wanted, strict=True):
        assert torch.allclose(value, plain, atol=1e-4)
    assert all(torch.equal(value, mine[name]) for name, value in made.state().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"rank": 2}, "got rank 2 and alpha 8"), ({"target_modules": ("q_proj",)}, "other modules than the run's")],
)
def test_an_adapter_that_does_not_fit_the_backbone_is_refused(
    tiny_folder: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = exported(policy(tiny_folder, **changes), tiny_folder, tmp_path / "adapter")  # type: ignore[arg-type]
    with pytest.raises(Refused, match=message):
        named_adapter(policy(tiny_folder), folder)


def test_a_run_measures_kl_against_the_adapter_that_is_named(tmp_path: Path) -> None:
    """The adapter of a first run: KL to it is not 0 at the first step, KL to the base is."""
    from poimen_exp.tracking.metrics_log import read_metrics

    first = ["trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    run(small_settings("rloo", *first), tmp_path / "a")
    one = [*first[1:], "trainer.total_training_steps=1"]
    run(small_settings("rloo", *one), tmp_path / "base")
    run(small_settings("rloo", *one, f"reference.adapter={tmp_path / 'a' / 'adapter'}"), tmp_path / "named")

    def kl(name: str) -> float:
        (line,) = [line for line in read_metrics(tmp_path / name / "metrics.jsonl").lines if line.step == 1]
        assert line.counts["actor/reward_kl_penalty"] == 16
        assert line.metrics["actor/reward_kl_penalty_coeff"] == 0.01
        return line.metrics["actor/reward_kl_penalty"]

    assert kl("base") == pytest.approx(0.0, abs=1e-6)
    assert abs(kl("named")) > 1e-4
