"""Fixtures for all tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a thread a worker: more would wait for each other

from collections.abc import Callable, Iterator

import pytest
from warm import Warm, warm

LONGEST = (
    "test_verl_whole.py",
    "test_sweep_faults.py",
    "test_resume.py",
    "test_rewards.py",
    "test_a9.py",
    "test_packaged_prompts.py",
    "test_kill.py",
    "test_export_verl.py",
    "test_mutations.py",
)
"""About a minute and more, and first: a worker that met one of them last would end alone.

Those that start many processes at once (Ray's, the trainings of a7) do not stand side by side.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those with slow tests, so that the last one to end is a short one.

    The order within a file stays.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.name, len(place)), item.path not in slow))


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


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A Python whose processes begin with all that a run imports."""
    with warm(tmp_path_factory.mktemp("warm")) as started:
        yield started
