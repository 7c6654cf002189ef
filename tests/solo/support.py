"""Rows, settings and policies of the trainer tests; the plain log-probs that everything is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poimen_exp.gates.check_step import plain_loss
from poimen_exp.gates.metrics import Means
from poimen_exp.gates.types import Prompt
from poimen_exp.solo.policy import Policy
from poimen_exp.solo.ragged import spread
from poimen_exp.solo.rows import Row
from poimen_exp.solo.settings import LossSettings, ModelSettings, OptimSettings, StepSettings
from poimen_exp.solo.task import RolloutBatch
from poimen_exp.solo.update import Updater

CPU = torch.device("cpu")
PAD = 0
TEMPERATURE = 0.7
LOSS: LossSettings = plain_loss()
OPTIM = OptimSettings(
    lr=1e-2,
    weight_decay=0.0,
    betas=(0.9, 0.999),
    lr_warmup_steps=0,
    lr_scheduler_type="constant",
    min_lr_ratio=0.0,
    grad_clip=1e9,
    total_training_steps=10,
)
STEP = StepSettings(train_batch_size=2, ppo_mini_batch_size=2, ppo_epochs=1, micro_batch_tokens=10_000, shuffle=True)


def row(prompt: Sequence[int], shared: int, response: Sequence[int], log_probs: Sequence[float] | None = None) -> Row:
    return Row(Prompt(tuple(prompt), shared), tuple(response), tuple(log_probs or [0.0] * len(response)))


def some_rows() -> list[Row]:
    """Six rows over three prefixes (one of them empty) of unequal lengths."""
    return [
        row([10, 11, 12, 13, 20], 4, [30, 31, 2]),
        row([10, 11, 12, 13, 21, 22, 23], 4, [32, 2]),
        row([10, 11, 12, 13, 21], 4, [33, 34, 35, 36, 37, 2]),
        row([14, 15, 24, 25], 2, [38]),
        row([14, 15, 26], 2, [39, 40, 41, 2]),
        row([16, 17, 18], 0, [42, 2]),
    ]


def plain_log_probs(model: Any, item: Row, temperature: float = TEMPERATURE) -> Tensor:
    """[R] one forward of one row: no padding, no cache, no shared prefix."""
    ids = torch.tensor([item.prompt.ids + item.response])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(item.prompt.ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(item.response)[:, None])[:, 0]


def policy(folder: Path, rank: int = 4, **changes: Any) -> Policy:
    """A policy whose adapter already does something (a fresh one has B = 0)."""
    settings = ModelSettings(
        path=folder,
        lora_rank=rank,
        lora_alpha=8,
        target_modules=("q_proj", "v_proj", "down_proj"),
        dtype="float32",
        attn_implementation="sdpa",
        adapter=None,
    )
    torch.manual_seed(1)
    made = Policy(replace(settings, **changes), CPU)
    with torch.no_grad():
        for name, value in made.trainable().items():
            if "lora_B" in name:
                value.normal_(0.0, 0.2)
    made.sync()
    return made


def batch(rows: Sequence[Row], advantages: Sequence[float], group: Sequence[int]) -> RolloutBatch:
    return RolloutBatch(
        rows=tuple(rows),
        names=tuple(f"row {place}" for place in range(len(rows))),
        advantages=spread(torch.tensor(list(advantages)), rows),
        group=torch.tensor(list(group)),
        metrics=Means(),
        watch=Means(),
        attempted=len(rows),
        failed=0,
        records=(),
    )


def some_batch() -> RolloutBatch:
    return batch(some_rows(), [1.0, -1.0, 0.25, 0.5, -0.5, -0.25], [0, 0, 0, 1, 1, 1])


def updater(of: Policy, loss: LossSettings = LOSS, optim: OptimSettings = OPTIM, step: StepSettings = STEP) -> Updater:
    return Updater(of, of.state(), PAD, TEMPERATURE, loss, optim, step)
