"""``SHA256SUMS``: hashes of files in a folder, in the form that ``sha256sum -c`` reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from poimen_exp.errors import RunFailed
from poimen_exp.tracking.files import sha256_of, write_atomic

SUMS_NAME = "SHA256SUMS"


def read_sums(folder: Path) -> dict[str, str]:
    """Hash by path relative to ``folder``; empty where there is no such file.

    Raises:
        RunFailed: a line that is not a hash and a path; the message starts with ``file:line``.
    """
    path = folder / SUMS_NAME
    found = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), start=1):
        digest, gap, name = line.partition("  ")
        if len(digest) != 64 or not gap or not name:
            raise RunFailed(f"{path}:{number}: damaged: expected a SHA-256, two spaces and a path")
        found[name] = digest
    return found


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Replaces the file."""
    lines = (f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    write_atomic(folder / SUMS_NAME, "".join(lines).encode())


def note_sum(file: Path) -> None:
    """Adds or replaces the hash of ``file`` in its folder's sums."""
    write_sums(file.parent, {**read_sums(file.parent), file.name: sha256_of(file)})


def drop_sums(folder: Path, names: Collection[str]) -> None:
    """Takes files that are no longer there out of the folder's sums."""
    sums = read_sums(folder)
    if not sums.keys().isdisjoint(names):
        write_sums(folder, {name: digest for name, digest in sums.items() if name not in names})


def sums_of(folder: Path) -> dict[str, str]:
    """Hashes of every file below ``folder`` but the sums themselves."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256_of(path) for path in files if path != folder / SUMS_NAME}
