"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture
def require() -> Callable[[str, str | None], None]:
    """``require("vllm", missing)``: goes on if ``missing`` is None, otherwise skips with it as the reason.

    Where ``POIMEN_REQUIRE`` (a comma-separated list) names the thing, a skip would be a false claim: the test fails.
    """

    def check(what: str, missing: str | None) -> None:
        if missing is None:
            return
        required = {name.strip() for name in os.environ.get("POIMEN_REQUIRE", "").split(",")}
        if what in required:
            pytest.fail(f"POIMEN_REQUIRE names {what}, but: {missing}")
        pytest.skip(f"{what}: {missing}")

    return check
