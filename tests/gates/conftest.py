"""Property tests without a deadline: a loaded machine is no failure."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import settings

from poimen_exp.gates.check_step import import_engines

settings.register_profile("poimen", deadline=None, database=None, max_examples=60)
settings.load_profile("poimen")


@pytest.fixture(scope="session")
def engines() -> None:
    """Loads verl and transformers once, with their own warnings silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_engines()
