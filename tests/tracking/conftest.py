"""Fixtures for the records of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def wandb_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine on which nobody ever logged in to W&B; its service is stopped at the end."""
    import wandb

    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith(("WANDB_", "XDG_")) or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    wandb.teardown()  # it remembers the settings it first saw
    yield home
    wandb.teardown()
