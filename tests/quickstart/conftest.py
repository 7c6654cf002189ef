"""The shipped model and corpus, loaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import poimen_exp
from poimen_exp.corpus import Corpus, open_corpus
from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.gates.types import ReadingTask
from poimen_exp.quickstart.logs import CHUNK_TOKENS
from poimen_exp.quickstart.model import MEMORY_TOKENS
from poimen_exp.solo.settings import CorpusSettings

ASSETS = Path(poimen_exp.__file__).parent / "assets" / "quickstart"


@pytest.fixture(scope="session")
def codec() -> HfCodec:
    from transformers import AutoTokenizer

    return HfCodec(AutoTokenizer.from_pretrained(ASSETS / "model"))


@pytest.fixture(scope="session")
def protocol(codec: HfCodec) -> GateProtocol:
    return GateProtocol(codec, "chunk_first", "terse", MEMORY_TOKENS)


@pytest.fixture(scope="session")
def network() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ASSETS / "model", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def corpus(codec: HfCodec, protocol: GateProtocol, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    settings = CorpusSettings(
        path=ASSETS / "corpus",
        chunk_tokens=CHUNK_TOKENS,
        max_chunks=6,
        min_kappa=0.6,
        allow_unmeasured=False,
        on_too_long="refuse",
        split_seed=0,
        val_fraction=0.2,
        test_fraction=0.2,
        max_val_tasks=None,
    )

    def prompt_tokens(question: str, chunk: str) -> int:
        return len(protocol.turn_prompt(question, chunk, "").ids) + MEMORY_TOKENS

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return open_corpus(settings, codec, prompt_tokens, max_prompt_length=128)


@pytest.fixture(scope="session")
def tasks(corpus: Corpus) -> list[ReadingTask]:
    return [*corpus.split("train"), *corpus.split("val"), *corpus.split("test")]
