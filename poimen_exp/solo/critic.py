"""The value model of gae: a token classifier of one label on the critic's own model, optimizer and schedule.

As in verl 0.9.1 (``workers/engine/fsdp``, model type ``value_model``): ``AutoModelForTokenClassification`` with
``num_labels=1``; the value of a response token is read one position earlier, before the token is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from poimen_exp.errors import Refused
from poimen_exp.solo.fused import use_fused_lora, use_fused_norms
from poimen_exp.solo.losses import MiniBatchSize, finite, summed
from poimen_exp.solo.offload import model_on_device, state_on_device
from poimen_exp.solo.policy import ADAPTER, frozen_state, put_weights
from poimen_exp.solo.ragged import Ragged, at
from poimen_exp.solo.rows import Row, micro_batches, pad_left, pad_right
from poimen_exp.solo.settings import NO_OFFLOAD, CriticSettings, OffloadSettings
from poimen_exp.solo.task import RolloutBatch
from poimen_exp.solo.update import UpdateReport, lr_schedule, mini_batches, role_report, step_quietly


@dataclass(frozen=True)
class ValueBatch:
    """Inputs of the value loss for N rows of up to R response tokens; all are [N, R]."""

    predicted: Tensor
    returns: Tensor
    values: Tensor
    """Of the critic before this batch's optimizer steps."""
    mask: Tensor
    """bool, True on response tokens."""


def value_loss(batch: ValueBatch, size: MiniBatchSize, settings: CriticSettings) -> tuple[Tensor, dict[str, float]]:
    """This micro-batch's share of the mini-batch's clipped value loss, and its share of every metric.

    Half the larger of (V - R)^2 and (clip(V, V_old +- cliprange_value) - R)^2: verl's ``compute_value_loss``.
    """
    from verl.trainer.ppo.core_algos import compute_value_loss

    loss, clipped = compute_value_loss(
        vpreds=batch.predicted,
        returns=batch.returns,
        values=batch.values,
        response_mask=batch.mask.float(),
        cliprange_value=settings.cliprange_value,
        loss_agg_mode=settings.loss_agg_mode,
        batch_num_tokens=size.tokens,
        global_batch_size=size.rows,
        loss_scale_factor=settings.loss_scale_factor,
    )
    share = float(batch.mask.sum()) / size.tokens
    return loss, {
        "critic/vf_loss": loss.item(),
        "critic/vf_clipfrac": float(clipped) * share,
        "critic/vpred_mean": float(batch.predicted.detach()[batch.mask].sum()) / size.tokens,
    }


class Critic:
    """Value model, optimizer and schedule.

    Without LoRA every weight is trained, in float32 whatever the forwards run in: at small rates a bfloat16 weight does
    not move. With LoRA the base is frozen in the forwards' type; adapter and head are float32.

    Args:
        train_batch_size: prompts of a rollout batch.
        offload: whether weights and optimizer state lie in main memory outside of ``on_device`` and ``learning``.
    """

    def __init__(
        self,
        settings: CriticSettings,
        pad_id: int,
        train_batch_size: int,
        device: torch.device,
        offload: OffloadSettings = NO_OFFLOAD,
    ) -> None:
        self._settings, self._pad_id, self._batch_size, self.device = settings, pad_id, train_batch_size, device
        self._dtype = getattr(torch, settings.dtype)
        self._moves, self._state_moves = offload.critic, offload.critic_optimizer
        home = "cpu" if self._moves else device
        self.model = _value_model(settings).to(home).eval()  # no dropout: old and new values are of one function
        self.optimizer = torch.optim.AdamW(
            self.trainable().values(),
            lr=settings.optim.lr,
            betas=settings.optim.betas,
            weight_decay=settings.optim.weight_decay,
        )
        self.schedule = lr_schedule(self.optimizer, settings.optim)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A phase that needs the weights."""
        with model_on_device(self.model, self.device, self._moves):
            yield

    @contextmanager
    def learning(self) -> Iterator[None]:
        """A phase that needs weights and optimizer state."""
        with self.on_device(), state_on_device(self.optimizer, self.device, self._state_moves):
            yield

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that the optimizer moves, by name."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """Copy of the trainable weights."""
        return frozen_state(self.trainable())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Puts trainable weights back; names must match exactly."""
        put_weights(self.trainable(), state, "critic")

    @torch.no_grad()
    def values(self, rows: Sequence[Row]) -> Ragged:
        """Value before each response token of each row."""
        out: dict[int, Tensor] = {}
        for places in self._micro_batches(rows, range(len(rows))):
            predicted, mask = self._forward([rows[place] for place in places])
            for place, values, kept in zip(places, predicted, mask, strict=True):
                out[place] = values[kept]
        return tuple(out[place] for place in range(len(rows)))

    def update(self, batch: RolloutBatch, values: Ragged) -> UpdateReport:
        """Learns the returns of one rollout batch: ``ppo_epochs`` passes over its mini-batches of whole groups.

        Args:
            values: of the batch before this update.
        """
        parts: list[Mapping[str, float]] = []
        norms: list[float] = []
        skipped: list[str] = []
        minis = mini_batches(batch.group, self._batch_size, self._settings.ppo_mini_batch_size)
        for _ in range(self._settings.ppo_epochs):
            for mini in minis:
                fault, part, norm = self._optimizer_step(batch, mini, values)
                if fault:
                    skipped.append(fault)
                else:
                    parts.append(part)
                    norms.append(norm)
        step_quietly(self.schedule)
        metrics = {name: value / max(len(parts), 1) for name, value in summed(parts).items()}
        if norms:
            metrics["critic/grad_norm"] = sum(norms) / len(norms)
        metrics["critic/lr"] = float(self.schedule.get_last_lr()[0])
        return role_report(metrics, len(norms), skipped)

    def _optimizer_step(
        self, batch: RolloutBatch, mini: Sequence[int], values: Ragged
    ) -> tuple[str | None, Mapping[str, float], float]:
        """Why the step was skipped, if it was; its metrics and gradient norm."""
        size = MiniBatchSize(sum(len(batch.rows[place].response) for place in mini), len(mini))
        self.optimizer.zero_grad(set_to_none=True)
        parts, names = [], f"{batch.names[mini[0]]} ... {batch.names[mini[-1]]}"
        for places in self._micro_batches(batch.rows, mini):
            predicted, mask = self._forward([batch.rows[place] for place in places])
            inputs = ValueBatch(predicted, at(batch.returns, places, mask), at(values, places, mask), mask)
            loss, part = value_loss(inputs, size, self._settings)
            if not finite(loss.detach()):
                self.optimizer.zero_grad(set_to_none=True)
                return f"critic: loss {loss.item()} over {names}", {}, math.nan
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(part)
        parameters = list(self.trainable().values())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._settings.optim.grad_clip))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return f"critic: gradient norm {norm} over {names}", {}, norm
        self.optimizer.step()
        return None, summed(parts), norm

    def _micro_batches(self, rows: Sequence[Row], order: Sequence[int]) -> list[list[int]]:
        """Cut by tokens; each row's prompt counts, since a forward of the critic shares none."""
        whole = [replace(row, prompt=replace(row.prompt, shared=0)) for row in rows]
        return micro_batches(whole, order, self._settings.micro_batch_tokens)

    def _forward(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """[N, R] value before each response token, and [N, R] bool True on response tokens."""
        prompts, prompt_mask = pad_left([row.prompt.ids for row in rows], self._pad_id, self.device)
        responses, mask = pad_right([row.response for row in rows], self._pad_id, self.device)
        attention = torch.cat([prompt_mask, mask], 1)
        with self._autocast():
            logits = self.model(
                input_ids=torch.cat([prompts, responses], 1),
                attention_mask=attention.long(),
                position_ids=(attention.cumsum(1) - 1).clamp(min=0),
            ).logits
        before = logits[:, prompts.shape[1] - 1 : -1, 0].float()
        return before * mask, mask

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            yield


def _value_model(settings: CriticSettings) -> Any:
    from transformers import AutoConfig, AutoModelForTokenClassification
    from transformers.utils import logging

    config = AutoConfig.from_pretrained(settings.path, local_files_only=True)
    config.num_labels, config.classifier_dropout = 1, 0.0
    base_dtype = getattr(torch, settings.dtype) if settings.lora_rank else torch.float32
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # a head that the folder does not hold is new, and said to be at every load
    try:
        model: Any = AutoModelForTokenClassification.from_pretrained(
            settings.path,
            config=config,
            dtype=base_dtype,
            attn_implementation=settings.attn_implementation,
            local_files_only=True,
        )
    except ValueError as error:
        raise Refused(
            f"critic.model.path={settings.path}: no token classifier of this architecture: {error}"
        ) from error
    finally:
        logging.set_verbosity(level)
    if base_dtype != torch.float32:
        use_fused_norms(model)
    return _with_adapter(model, settings) if settings.lora_rank else model


def _with_adapter(model: Any, settings: CriticSettings) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = settings.target_modules
    config = LoraConfig(
        task_type="TOKEN_CLS",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=["score", "classifier"],
        modules_to_save=["score", "classifier"],
    )
    wrapped: Any = get_peft_model(model, config)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if settings.dtype != "float32":
        use_fused_lora(wrapped, ADAPTER)
    return wrapped
