from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from poimen_exp.config.compose import compose_config

Compose = Callable[..., DictConfig]


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name a model folder and a corpus folder that exist."""
    folder = tmp_path_factory.mktemp("places")
    model, corpus = folder / "model", folder / "corpus"
    model.mkdir()
    corpus.mkdir()
    (model / "config.json").write_text("{}")
    return [f"corpus.path={corpus}", f"actor_rollout_ref.model.path={model}"]


@pytest.fixture(scope="session")
def paper(places: list[str]) -> DictConfig:
    """The paper's experiment with its folders named. Copy it before changing it."""
    return compose_config(["+experiment=paper", *places])


@pytest.fixture
def conf_beside(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes a config file into a folder of its own; returns the flag that adds the folder."""

    def write(name: str, text: str) -> str:
        path = tmp_path / "extra" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return f"--config-dir={tmp_path / 'extra'}"

    return write
