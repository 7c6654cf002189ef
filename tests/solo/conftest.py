"""A two-layer Qwen2 with random weights, on disk and in memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from poimen_exp.gates.check_step import import_engines


@pytest.fixture(scope="session", autouse=True)
def engines() -> None:
    """Loads verl and transformers once, with their own warnings silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_engines()
        import peft  # noqa: F401


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, engines: None) -> Path:  # noqa: ARG001
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=[2], pad_token_id=0)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Any:
    """Not to be changed by a test."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, local_files_only=True).float().eval()
