"""``poimen.json``: what an adapter was trained on and with, and the hashes that prove its files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from poimen_exp.errors import Refused
from poimen_exp.gates.protocol import PROTOCOL_VERSION, Layout, Wording

SCHEMA: Literal["poimen.adapter/1"] = "poimen.adapter/1"
MANIFEST_NAME = "poimen.json"
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

PROMPTS_PROTOCOL = "poimen.prompts/1"
"""Of adapters that were trained on single-turn prompts: the model's own chat template around the user's messages."""

LabelStatus = Literal["constructed", "measured", "unmeasured"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class AdapterInfo:
    """What a trainer knows about the adapter it exports.

    Attributes:
        base_model: folder of the model the adapter was trained on.
        dtype: of the base weights in training; serving uses the same.
        layout, wording, label_status: of the gates; None for an adapter of single-turn prompts.
        memory_tokens, chunk_tokens: of the gates; of prompts 0 and the longest prompt.
        response_tokens: longest response of a turn.
        corpus_id, corpus_sha256: of the corpus, or of the prompts' files.
        protocol: version of the prompts it was trained on.
        metrics: metric name to value at the exported step, as in ``metrics.jsonl``.
    """

    base_model: Path
    dtype: Dtype
    layout: Layout | None
    wording: Wording | None
    memory_tokens: int
    chunk_tokens: int
    response_tokens: int
    corpus_id: str
    corpus_sha256: str
    label_status: LabelStatus | None
    run_id: str
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    protocol: str = PROTOCOL_VERSION


@dataclass(frozen=True)
class BaseModel:
    name: str
    """The folder's name: tells a reader which model was meant; the hash decides."""
    path: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``poimen.json``.

    Attributes:
        name, version: None until the adapter is published.
        lora_rank: largest rank of any module.
        sha256: of each other file of the folder, by name.
    """

    name: str | None
    version: str | None
    base_model: BaseModel
    dtype: Dtype
    lora_rank: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    layout: Layout | None
    wording: Wording | None
    memory_tokens: int
    chunk_tokens: int
    response_tokens: int
    corpus_id: str
    corpus_sha256: str
    label_status: LabelStatus | None
    run_id: str
    step: int
    metrics: Mapping[str, float]
    sha256: Mapping[str, str]
    protocol: str
    """Version of the turn protocol, prompts and parser; ``PROMPTS_PROTOCOL`` for an adapter of single-turn prompts."""
    schema: Literal["poimen.adapter/1"]

    def to_json(self) -> str:
        """The text of the file, keys in a fixed order."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an adapter folder.

    Raises:
        Refused: there is none, or it is not one.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Refused(
            f"adapter {folder}: no readable {MANIFEST_NAME} ({error.strerror}); expected a folder that a run or "
            "`poimen adapter export` wrote"
        ) from error
    return parse_manifest(text, str(path))


def parse_manifest(text: str | bytes, where: str) -> Manifest:
    """The manifest in ``text``, every field checked; ``where`` names it in messages."""
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{where}: not a {SCHEMA} manifest ({error})") from error
    if set(manifest.sha256) != {CONFIG_NAME, WEIGHTS_NAME}:
        raise Refused(f"{where}: hashes of {sorted(manifest.sha256)}, expected those of {CONFIG_NAME}, {WEIGHTS_NAME}")
    return manifest
