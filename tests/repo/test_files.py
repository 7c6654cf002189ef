"""What CONTRIBUTING says of files."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "poimen_exp"


def test_every_file_of_the_package_has_under_400_lines() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert len(lengths) > 100
    assert {name: length for name, length in lengths.items() if length >= 400} == {}
