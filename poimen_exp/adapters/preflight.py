"""What a run must know before it trains: that its adapter can be mounted, and that it can be published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poimen_exp.adapters.check import mount_check
from poimen_exp.adapters.lora_config import check_lora_config, mountable_linears
from poimen_exp.adapters.registry import Registry, check_name


def check_before_training(
    base_model_dir: Path, rank: int, lora_alpha: int, target_modules: str | Sequence[str], warm_start: Path | None
) -> None:
    """Refuses an adapter that could be trained but not served: rank, target modules, the adapter it starts from."""
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = {"r": rank, "lora_alpha": lora_alpha, "target_modules": targets}
    check_lora_config(config, mountable_linears(base_model_dir), "actor_rollout_ref.model (lora_rank, target_modules)")
    if warm_start is not None:
        mount_check(warm_start, base_model_dir)


def check_before_publishing(registry: str | None, name: str) -> None:
    """Refuses a name or a registry that would lose the adapter at the end of a run; None publishes nothing."""
    if registry is not None:
        check_name(name)
        Registry(registry).names()
