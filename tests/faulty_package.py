"""One-line faults, written into a copy of the package that is imported in place of the real one."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import poimen_exp

PACKAGE = Path(poimen_exp.__file__).parent


@contextmanager
def package_at(root: Path) -> Iterator[None]:
    """The package below ``root`` is what imports find; the real one is back afterwards."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "poimen_exp"}
    for name in kept:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name.split(".")[0] == "poimen_exp"]:
            del sys.modules[name]
        sys.modules.update(kept)


def copy_with(root: Path, file: str | None = None, old: str = "", new: str = "") -> Path:
    """``root``, with a copy of the package in which ``old`` is replaced in ``file``; unchanged without one."""
    skipped = shutil.ignore_patterns("assets", "verl_backend", "cli")
    package = Path(shutil.copytree(PACKAGE, root / "poimen_exp", ignore=skipped))
    (package / "assets").symlink_to(PACKAGE / "assets")
    if file is None:
        return root
    path = package / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file}: {old!r} stands there {text.count(old)} times"
    path.write_text(text.replace(old, new))
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()
    return root
