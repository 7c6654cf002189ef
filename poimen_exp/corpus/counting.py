"""Tokenizers for the command line, where no model is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

from poimen_exp.corpus.chunking import TokenCounter
from poimen_exp.errors import Refused

_WORD = re.compile(r"\S+")


class WordEstimate:
    """Counts 1.3 tokens a word: every third word or so has two ids. For English prose; code has twice as many."""

    def encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(range(len(self.plain_offsets(text))))

    def plain_offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        spans: list[tuple[int, int]] = []
        for number, match in enumerate(_WORD.finditer(text)):
            spans += [match.span()] * ((number + 1) * 13 // 10 - number * 13 // 10)
        return tuple(spans)

    def count_plain(self, text: str) -> int:
        return len(text.split()) * 13 // 10


class TokenizerFile:
    """A ``tokenizer.json``, read without its added tokens: text that spells a control token is plain characters.

    It gives the ids that ``HfCodec.encode_plain`` gives, without importing transformers.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Refused(f"--tokenizer {path}: cannot be read: {error}") from None
        if not isinstance(state, dict) or "model" not in state:
            raise Refused(f"--tokenizer {path}: not a tokenizer.json of Hugging Face tokenizers")
        state |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._plain = Tokenizer.from_str(json.dumps(state))

    def encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def plain_offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        return tuple(self._plain.encode(text, add_special_tokens=False).offsets)

    def count_plain(self, text: str) -> int:
        return len(self._plain.encode(text, add_special_tokens=False))


def load_counter(spec: str) -> TokenCounter:
    """``words`` for the estimate, else a ``tokenizer.json`` or a model folder that has one.

    Raises:
        Refused: there is no such file.
    """
    if spec == "words":
        return WordEstimate()
    path = Path(spec)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise Refused(f"--tokenizer {spec}: got no tokenizer.json there; give a model folder, the file, or 'words'")
    return TokenizerFile(file)
