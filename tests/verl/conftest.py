from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from poimen_exp.config.compose import compose_config

Smoke = Callable[..., DictConfig]


@pytest.fixture
def smoke() -> Smoke:
    """Composes the CPU experiment of the verl backend with overrides."""

    def compose(*overrides: str) -> DictConfig:
        return compose_config(["+experiment=verl_smoke", *overrides])

    return compose
