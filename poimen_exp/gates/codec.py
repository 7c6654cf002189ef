"""Text to token ids and back, with corpus text kept apart from control tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer


class TextCodec(Protocol):
    """What the gates need of a tokenizer."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response."""
        ...

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Ids of text that the program wrote: spellings of special tokens are those tokens."""
        ...

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of text that a corpus or a model wrote: spellings of special tokens are plain characters."""
        ...

    def plain_offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        """Character span ``[start, end)`` in ``text`` of each id of ``encode_plain(text)``."""
        ...

    def count_plain(self, text: str) -> int:
        """``len(encode_plain(text))``; keeps nothing of the text."""
        ...

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of sampled ids, special tokens spelled out."""
        ...

    def render(self, user: str) -> str:
        """The model's chat template around one user message, up to where the model begins to write."""
        ...


class HfCodec:
    """A ``TextCodec`` over a fast Hugging Face tokenizer.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        stop_ids: ids that end a response; the tokenizer's end-of-sequence id if left out.
    """

    def __init__(self, tokenizer: Any, stop_ids: tuple[int, ...] | None = None) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        # Added tokens are what lets text spell a control token: the plain twin has none.
        state = json.loads(self._backend.to_str())
        state["added_tokens"], state["post_processor"] = [], None
        self._plain = Tokenizer.from_str(json.dumps(state))
        self._stop_ids = stop_ids if stop_ids is not None else (int(tokenizer.eos_token_id),)
        self._encode_plain = lru_cache(maxsize=512)(self._encode_plain_uncached)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    @property
    def pad_id(self) -> int:
        """Id used to fill batches; masked everywhere."""
        pad = self._tokenizer.pad_token_id
        return int(self._stop_ids[0] if pad is None else pad)

    def encode_template(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def _encode_plain_uncached(self, text: str) -> tuple[int, ...]:
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        return self._encode_plain(text)

    def plain_offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        return tuple(self._plain.encode(text, add_special_tokens=False).offsets)

    def count_plain(self, text: str) -> int:
        return len(self._plain.encode(text, add_special_tokens=False))

    def decode(self, ids: tuple[int, ...]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def plain_text(self, ids: tuple[int, ...]) -> str:
        """Text of sampled ids without special tokens, as verl hands it to reward functions."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Ids of the model's chat template around a dialogue, up to where the model begins to write."""
        out = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return tuple(int(token) for token in out)

    def render(self, user: str) -> str:
        message = [{"role": "user", "content": user}]
        return str(self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
