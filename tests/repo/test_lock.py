"""The committed lock is what a fresh resolution gives."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPORT = "uv export --no-emit-project --no-header --no-emit-index-url --all-extras --format requirements-txt --quiet"


@pytest.mark.network
def test_requirements_lock_equals_a_fresh_resolution(
    tmp_path: Path, require: Callable[[str, str | None], None]
) -> None:
    require("network", None if shutil.which("uv") else "no uv on the path")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    found = subprocess.run(EXPORT.split(), cwd=tmp_path, capture_output=True, text=True, check=False)
    require("network", found.stderr[-300:] if "error sending request" in found.stderr else None)
    assert found.returncode == 0, found.stderr
    assert found.stdout == (ROOT / "requirements.lock").read_text()


def test_requirements_lock_names_no_registry_and_pins_by_hash() -> None:
    lines = (ROOT / "requirements.lock").read_text().split("\n")
    assert not [line for line in lines if "://" in line or line.startswith("--index")]
    packages = [at for at, line in enumerate(lines) if line and not line.startswith((" ", "#"))]
    assert len(packages) > 100
    assert [lines[at] for at in packages if "--hash=sha256:" not in lines[at + 1]] == []
