"""SHA-256 of files and of base models; a file's hash is remembered until the file changes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from poimen_exp.adapters.files import write_text_atomically
from poimen_exp.errors import Refused

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
# What transformers writes into config.json on every save and what says nothing about the model.
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version")


def sha256_of_bytes(data: bytes) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def base_model_sha256(folder: Path) -> str:
    """Identity of a model folder: SHA-256 over its ``config.json`` and the hashes of its weight files.

    ``config.json`` enters as its values in sorted order, without the path and the transformers version that a save
    adds, so that a copied or re-saved model is the same model. Another sharding is another hash. Hashing a 3B model
    reads 6 GB once; later calls compare size and times only (cache in ``$XDG_CACHE_HOME/poimen_exp``).

    Raises:
        Refused: no folder, no ``config.json`` or no weights.
    """
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise Refused(f"base model {folder}: no config.json there; expected a folder that transformers can load")
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refused(f"base model {config_path}: not JSON ({error})") from error
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG}
    lines = ["config " + sha256_of_bytes(json.dumps(kept, sort_keys=True).encode())]
    lines += [f"{path.name} {_remembered_sha256(path)}" for path in weight_files(folder)]
    return sha256_of_bytes("\n".join(lines).encode())


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder by name: safetensors, or where there are none, torch files."""
    for pattern in _WEIGHT_PATTERNS:
        found = sorted(path for path in folder.glob(pattern) if path.name != "adapter_model.safetensors")
        if found:
            return found
    raise Refused(f"base model {folder}: no weights there; expected {' or '.join(_WEIGHT_PATTERNS)}")


def _remembered_sha256(path: Path) -> str:
    state = path.stat()
    key = f"{path.resolve()}\n{state.st_size}\n{state.st_mtime_ns}\n{state.st_ctime_ns}\n{state.st_ino}"
    entry = _cache_folder() / sha256_of_bytes(key.encode())
    try:
        remembered = entry.read_text(encoding="ascii")
    except OSError:
        remembered = ""
    if len(remembered) == 64:
        return remembered
    digest = sha256_of_file(path)
    try:
        write_text_atomically(entry, digest)
    except OSError:  # a read-only home costs the next call its time, nothing else
        return digest
    return digest


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "poimen_exp" / "sha256"
