"""The policy that KL is measured against, as adapter weights of the actor's own base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from poimen_exp.errors import Refused
from poimen_exp.solo.policy import ADAPTER, Policy


def named_adapter(policy: Policy, folder: Path) -> Mapping[str, Tensor]:
    """Weights of a PEFT folder, under the names that the policy's own adapter has.

    Raises:
        Refused: another rank, scale or set of modules than the run's: the two would not fit on one backbone.
    """
    from peft import PeftConfig, load_peft_weights

    mine, other = policy.model.peft_config[ADAPTER], PeftConfig.from_pretrained(str(folder))
    if (mine.r, mine.lora_alpha) != (other.r, other.lora_alpha):
        raise Refused(
            f"reference.adapter={folder}: got rank {other.r} and alpha {other.lora_alpha}, expected those of the run, "
            f"{mine.r} and {mine.lora_alpha}: the reference is put in on the actor's backbone"
        )
    loaded = load_peft_weights(str(folder), device=str(policy.device))
    weights = {_own_name(name): value.float() for name, value in loaded.items()}
    wanted = policy.state()
    wrong = sorted(weights.keys() ^ wanted.keys())
    wrong += sorted(name for name in weights.keys() & wanted.keys() if weights[name].shape != wanted[name].shape)
    if wrong:
        raise Refused(f"reference.adapter={folder}: other modules than the run's (first: {wrong[0]})")
    return weights


def _own_name(name: str) -> str:
    """``...lora_A.weight`` of a file is ``...lora_A.default.weight`` of a model."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.{ADAPTER}.{last}"
