"""A trained sequence classifier as the reward: its own model and tokenizer, on the device only while it scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from poimen_exp.adapters.hashing import base_model_sha256
from poimen_exp.errors import Refused
from poimen_exp.solo.offload import model_on_device
from poimen_exp.solo.rewards import Reward, RewardInput
from poimen_exp.solo.settings import RewardSettings
from poimen_exp.tracking.files import sha256_of


class SequenceClassifier:
    """Scores prompt and response, in the classifier's own chat template, by its last label's logit at the last token.

    That is what verl 0.9.1 asks of its reward server (``compute_score_disrm``: ``classify`` without activation, the
    last entry). Texts of equal length go through together, so that no padding enters and a score does not depend on its
    neighbours. Between phases the weights lie in main memory.

    Args:
        settings: ``model_path`` names the folder.
        device: where it scores.
    """

    def __init__(self, settings: RewardSettings, device: torch.device) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        assert settings.model_path is not None
        path = settings.model_path
        self._device, self._batch_tokens = device, settings.model_batch_tokens
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if self._tokenizer.chat_template is None:
            raise Refused(f"reward.reward_model.model_path={path}: its tokenizer has no chat template")
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, settings.model_dtype), local_files_only=True, output_loading_info=True
        )
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])[0]
            raise Refused(
                f"reward.reward_model.model_path={path}: no trained sequence classifier: {missing} is not in it"
            )
        model.config.pad_token_id = -1  # no token is padding: the last one counts
        self._model: Any = model.eval().requires_grad_(False)
        tokenizer = sha256_of(path / "tokenizer.json")
        self._identity = (
            f"sequence_classifier/1 {path.name} model sha256 {base_model_sha256(path)} tokenizer sha256 {tokenizer} "
            f"{settings.model_dtype}"
        )

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def device(self) -> torch.device:
        """Where the weights lie now."""
        device: torch.device = next(self._model.parameters()).device
        return device

    def check(self, row: RewardInput) -> str | None:  # noqa: ARG002
        """Nothing is lacking: a prompt and a response are all it reads."""
        return None

    @torch.no_grad()
    def score(self, inputs: Sequence[RewardInput]) -> Sequence[Reward]:
        ids = [self._ids(item) for item in inputs]
        scores: dict[int, float] = {}
        with model_on_device(self._model, self._device, moves=True):
            for places in _equal_lengths(ids, self._batch_tokens):
                batch = torch.tensor([ids[place] for place in places], device=self._device)
                logits = self._model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits[:, -1].float()
                scores |= dict(zip(places, logits.tolist(), strict=True))
        return [Reward(scores[place]) for place in range(len(inputs))]

    def _ids(self, item: RewardInput) -> tuple[int, ...]:
        dialogue = [*map(dict, item.messages), {"role": "assistant", "content": item.solution}]
        text = self._tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=False)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _equal_lengths(ids: Sequence[Sequence[int]], token_budget: int) -> list[list[int]]:
    """Places of texts of one length, in runs of at most ``token_budget`` tokens; a longer text goes alone."""
    by_length: dict[int, list[int]] = {}
    for place, row in enumerate(ids):
        by_length.setdefault(len(row), []).append(place)
    out = []
    for length, places in sorted(by_length.items()):
        count = max(1, token_budget // max(length, 1))
        out += [places[start : start + count] for start in range(0, len(places), count)]
    return out
