"""Base plus adapter as one plain model folder, for servers that mount no adapters."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poimen_exp.adapters.check import mount_check
from poimen_exp.adapters.files import folder_written_aside
from poimen_exp.adapters.manifest import MANIFEST_NAME, Dtype
from poimen_exp.adapters.probe import load_base, probe_ids
from poimen_exp.errors import Refused, RunFailed

TOLERANCE: Mapping[Dtype, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest difference between merged and base-plus-adapter logits that passes, as a share of the largest logit.
bfloat16 keeps 8 bits of a weight (steps of 0.4 %), and the rounding of every layer adds up."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@dataclass(frozen=True)
class MergeReport:
    """What was written, and how far its logits are from those of base plus adapter on the probe prompt.

    Attributes:
        difference: largest absolute difference of any logit.
        tolerance: the difference that would still have passed.
    """

    folder: Path
    dtype: Dtype
    difference: float
    tolerance: float


def merge_adapter(adapter: Path, base_model_dir: Path, folder: Path, dtype: Dtype) -> MergeReport:
    """Writes the merged model to ``folder``, whole or not at all.

    Merged in float32, stored as ``dtype``. bfloat16 rounds away part of a small adapter: the difference is measured
    on what was written, against base plus adapter in float32.

    Raises:
        Refused: an adapter that cannot be mounted, or ``folder`` exists.
        RunFailed: the written model is further from base plus adapter than the tolerance.
    """
    if folder.exists():
        raise Refused(f"{folder}: exists already; name a new folder for the merged model")
    mount_check(adapter, base_model_dir)
    ids = probe_ids(base_model_dir)
    wanted = _merged(adapter, base_model_dir, ids)
    with folder_written_aside(folder) as aside:
        _save(wanted.model, aside, adapter, base_model_dir, dtype)
        got = _logits(load_base(aside, "float32"), ids)
        return _compare(folder, dtype, wanted, float((got - wanted.logits).abs().max()))


@dataclass(frozen=True)
class _Merged:
    """The merged model, logits of base plus adapter, and the largest change the adapter makes to a logit."""

    model: Any
    logits: Any
    effect: float


def _merged(adapter: Path, base_model_dir: Path, ids: Any) -> _Merged:
    from peft import PeftModel

    base = load_base(base_model_dir, "float32")
    plain = _logits(base, ids)
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    logits = _logits(model, ids)
    return _Merged(model.merge_and_unload(), logits, float((logits - plain).abs().max()))


def _compare(folder: Path, dtype: Dtype, wanted: _Merged, difference: float) -> MergeReport:
    tolerance = TOLERANCE[dtype] * float(wanted.logits.abs().max())
    if not difference <= tolerance:
        raise RunFailed(
            f"adapter merge: logits of the merged {dtype} model differ from base plus adapter by {difference:.3g}, "
            f"expected at most {tolerance:.3g}; nothing was written"
        )
    if not difference < wanted.effect / 2:
        raise RunFailed(
            f"adapter merge: storing in {dtype} changes logits by {difference:.3g}, the adapter itself changes them "
            f"by {wanted.effect:.3g} only, so most of it would be rounded away; nothing was written. "
            "Use --dtype float32, or serve the adapter unmerged"
        )
    return MergeReport(folder, dtype, difference, tolerance)


def _logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=ids).logits


def _save(model: Any, folder: Path, adapter: Path, base_model_dir: Path, dtype: Dtype) -> None:
    import torch

    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        if (base_model_dir / name).is_file():
            shutil.copyfile(base_model_dir / name, folder / name)
    if (adapter / MANIFEST_NAME).is_file():  # what the model was made of stays with it
        shutil.copyfile(adapter / MANIFEST_NAME, folder / MANIFEST_NAME)
