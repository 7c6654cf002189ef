"""What a GGUF file says about its tokenizer, and a fast tokenizer that does exactly that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from poimen_exp.errors import Refused

_CONTROL = 3
"""Token type of special tokens in GGUF (llama.cpp: LLAMA_TOKEN_TYPE_CONTROL)."""


@dataclass(frozen=True)
class GgufVocabulary:
    """The tokenizer of a GGUF file; ids are places in ``tokens``.

    Attributes:
        control: the special tokens, in order of id.
        merges: pairs of the byte-pair encoding, best first.
    """

    tokens: tuple[str, ...]
    control: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    bos: str
    eos: str
    pad: str
    unknown: str
    chat_template: str
    context_length: int


@contextmanager
def read_once() -> Iterator[None]:
    """Within it a GGUF file is read once, and its names are mapped once.

    transformers (5.9) reads it anew for the configuration and for the weights, and makes the map of names for every
    module of the model: most of a conversion's time.
    """
    import gguf

    plain = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = map(lru_cache, plain)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = plain


def read_vocabulary(path: Path) -> GgufVocabulary:
    """The vocabulary of a file of llama's architecture with SmolLM's byte-level BPE.

    Raises:
        Refused: no file, not GGUF, a field missing, or another kind of tokenizer.
    """
    fields = _fields(path)

    def get(name: str) -> Any:
        if name not in fields:
            raise Refused(f"{path}: no field {name}; expected a GGUF file of SmolLM2 with its tokenizer")
        return fields[name].contents()

    for name, wanted in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if (found := get(name)) != wanted:
            raise Refused(f"{path}: {name}: got {found!r}, expected {wanted!r} (SmolLM2)")
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    return GgufVocabulary(
        tokens=tuple(tokens),
        control=tuple(token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL),
        merges=tuple((left, right) for left, right in (pair.split(" ", 1) for pair in get("tokenizer.ggml.merges"))),
        bos=tokens[get("tokenizer.ggml.bos_token_id")],
        eos=tokens[get("tokenizer.ggml.eos_token_id")],
        pad=tokens[get("tokenizer.ggml.padding_token_id")],
        unknown=tokens[get("tokenizer.ggml.unknown_token_id")],
        chat_template=get("tokenizer.chat_template"),
        context_length=int(get("llama.context_length")),
    )


def _fields(path: Path) -> Any:
    from gguf import GGUFReader

    if not path.is_file():
        raise Refused(f"{path}: no file there; expected a GGUF file")
    try:
        return GGUFReader(str(path)).fields
    except (ValueError, IndexError) as error:  # what the reader raises on other bytes and on a cut file
        raise Refused(f"{path}: not a whole GGUF file: {error}") from error


def build_tokenizer(vocabulary: GgufVocabulary) -> Any:
    """The fast tokenizer that the GGUF file describes.

    ``AutoTokenizer.from_pretrained(gguf_file=...)`` (transformers 5.9) gives another: its end of sequence is
    ``<|im_start|>``, it has no padding token, and it keeps digits together.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: place for place, token in enumerate(vocabulary.tokens)}
    inner = Tokenizer(models.BPE(vocab=ids, merges=list(vocabulary.merges)))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in vocabulary.control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=vocabulary.bos,
        eos_token=vocabulary.eos,
        pad_token=vocabulary.pad,
        unk_token=vocabulary.unknown,
        model_max_length=vocabulary.context_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = vocabulary.chat_template
    return tokenizer
