"""Refuses a converted folder that would train or sample wrongly: tokenizer first, then a greedy reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poimen_exp.errors import Refused

END_OF_TURN = "<|im_end|>"
QUESTION = "What is the capital of France? Answer in one sentence."
EXPECTED = "Paris"
_REPLY_TOKENS = 24
_DIGITS = "on 17 May 2024"
_ROUND_TRIPS = (
    "a  b\n\n\tc",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600",
    "x = {1: [2, 3]}  # don't",
    "<think>no</think>",
)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer as every other part of the program loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def check_tokenizer(tokenizer: Any, where: Path) -> None:
    """Refuses a tokenizer whose end of turn, padding, digits, text or chat template came out wrong."""

    def require(what: str, got: object, expected: object) -> None:
        if got != expected:
            raise Refused(f"{where}: {what}: got {got!r}, expected {expected!r}; the conversion went wrong")

    require("end of sequence", tokenizer.eos_token, END_OF_TURN)
    require("padding", tokenizer.pad_token, END_OF_TURN)
    ids = tokenizer(_DIGITS, add_special_tokens=False).input_ids
    pieces = [tokenizer.decode([one]).strip() for one in ids]
    require("digits of a number", [piece for piece in pieces if piece.isdigit()], [*"172024"])
    for text in _ROUND_TRIPS:
        require("text after encoding", tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids), text)
    rendered = _render(tokenizer)
    require("chat template", (QUESTION in rendered, rendered.endswith("<|im_start|>assistant\n")), (True, True))
    ends = tokenizer(rendered, add_special_tokens=False).input_ids.count(tokenizer.eos_token_id)
    require("ends of turn in a rendered chat", ends, rendered.count(END_OF_TURN))


def check_reply(model: Any, tokenizer: Any, where: Path) -> str:
    """The model's greedy float32 reply to a fixed question, refused where it lacks the answer or does not end."""
    import torch

    ids = torch.tensor([tokenizer(_render(tokenizer), add_special_tokens=False).input_ids])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=_REPLY_TOKENS, use_cache=True
        )
    reply = str(tokenizer.decode(out[0, ids.shape[1] :]))
    if EXPECTED not in reply or not reply.endswith(END_OF_TURN):
        raise Refused(
            f"{where}: a greedy reply to {QUESTION!r}: got {reply!r}, expected {EXPECTED!r} and an end of turn "
            f"within {_REPLY_TOKENS} tokens; the weights were converted wrongly, or are another model's"
        )
    return reply.removesuffix(END_OF_TURN)


def _render(tokenizer: Any) -> str:
    message = [{"role": "user", "content": QUESTION}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
