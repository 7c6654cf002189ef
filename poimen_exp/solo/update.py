"""One step's updates: old and reference log-probs, mini-batches of whole groups, gradient, optimizer step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from poimen_exp.errors import Refused
from poimen_exp.solo.forward import token_stats
from poimen_exp.solo.losses import LossBatch, MiniBatchSize, actor_loss, finite, summed
from poimen_exp.solo.offload import state_on_device
from poimen_exp.solo.policy import Policy
from poimen_exp.solo.ragged import Ragged, at
from poimen_exp.solo.rows import PackedRows, Row, micro_batches, pack
from poimen_exp.solo.settings import LossSettings, OptimSettings, StepSettings
from poimen_exp.solo.task import Measured, Needs, RolloutBatch


@dataclass(frozen=True)
class UpdateReport:
    """Metrics of a step's updates, the optimizer steps taken, and one message for each that was skipped.

    ``stalled``: optimizer steps that roles skipped which took none.
    """

    metrics: Mapping[str, float]
    taken: int
    skipped: Sequence[str]
    stalled: int


def joined(reports: Sequence[UpdateReport]) -> UpdateReport:
    """One report of several roles' updates."""
    metrics: dict[str, float] = {}
    for report in reports:
        metrics |= report.metrics
    return UpdateReport(
        metrics,
        sum(report.taken for report in reports),
        [why for report in reports for why in report.skipped],
        sum(report.stalled for report in reports),
    )


def role_report(metrics: Mapping[str, float], taken: int, skipped: Sequence[str]) -> UpdateReport:
    """The report of one role."""
    return UpdateReport(metrics, taken, skipped, 0 if taken else len(skipped))


@dataclass
class _Log:
    parts: list[Mapping[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class Updater:
    """Optimizer, schedule and the update of one step.

    Args:
        offload: whether the optimizer state lies in main memory outside of ``learning``.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Mapping[str, Tensor],
        pad_id: int,
        temperature: float,
        loss: LossSettings,
        optim: OptimSettings,
        step: StepSettings,
        offload: bool = False,
    ) -> None:
        self._offload = offload
        self._policy, self._reference, self._pad_id = policy, reference, pad_id
        self._temperature, self._loss, self._optim, self._step = temperature, loss, optim, step
        self.optimizer = torch.optim.AdamW(
            policy.trainable().values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )
        self.schedule = lr_schedule(self.optimizer, optim)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """A phase that needs the trained model and its optimizer state."""
        with self._policy.on_device(), state_on_device(self.optimizer, self._policy.device, self._offload):
            yield

    @property
    def needs(self) -> Needs:
        """What ``update`` is to be told.

        One full mini-batch and one pass is a fresh-policy update: its old log-probs are those of its own forward
        (verl does the same); otherwise they are computed before the first optimizer step.
        """
        return Needs(log_probs=not self._step.fresh, ref_log_probs=self._loss.use_kl_loss)

    def update(self, batch: RolloutBatch, measured: Measured | None = None) -> UpdateReport:
        """Learns from one rollout batch: ``ppo_epochs`` passes over its mini-batches.

        Args:
            measured: what ``needs`` names, of this batch; found now if left out.
        """
        log, diff = _Log(), _Differences()
        minis = mini_batches(batch.group, self._step.train_batch_size, self._step.ppo_mini_batch_size)
        measured = self._measure(batch.rows) if measured is None else measured
        own_forward = measured.log_probs is None
        for _ in range(self._step.ppo_epochs):
            for mini in minis:
                self._optimizer_step(batch, mini, measured, log, diff if own_forward else None)
        if measured.log_probs is not None:
            diff.add(measured.log_probs, batch.rows)
        step_quietly(self.schedule)
        return role_report(self._metrics(log, diff), len(log.norms), log.skipped)

    def _measure(self, rows: Sequence[Row]) -> Measured:
        needs = self.needs
        return Measured(
            self.log_probs(rows) if needs.log_probs else None,
            self.reference_log_probs(rows) if needs.ref_log_probs else None,
        )

    def reference_log_probs(self, rows: Sequence[Row]) -> Ragged:
        """Log-probs of each row's response ids by the reference: the same base under its adapter weights."""
        with self._policy.using(self._reference):
            return self.log_probs(rows)

    @torch.no_grad()
    def log_probs(self, rows: Sequence[Row]) -> Ragged:
        """Log-probs of each row's response ids by the policy as it stands."""
        out: dict[int, Tensor] = {}
        for places in micro_batches(rows, range(len(rows)), self._step.micro_batch_tokens):
            packed = pack([rows[place] for place in places], self._pad_id, self._policy.device)
            with self._policy.autocast():
                stats = token_stats(self._policy.model, packed, self._temperature)
            for place, values, mask in zip(places, stats.log_probs, packed.response_mask, strict=True):
                out[place] = values[mask]
        return tuple(out[place] for place in range(len(rows)))

    def _optimizer_step(
        self,
        batch: RolloutBatch,
        mini: Sequence[int],
        measured: Measured,
        log: _Log,
        diff: _Differences | None,
    ) -> None:
        old, ref = measured.log_probs, measured.ref_log_probs
        size = MiniBatchSize(sum(len(batch.rows[place].response) for place in mini), len(mini))
        self.optimizer.zero_grad(set_to_none=True)
        parts, fault = [], _bad_advantage(batch, mini)
        for places in [] if fault else micro_batches(batch.rows, mini, self._step.micro_batch_tokens):
            packed = pack([batch.rows[place] for place in places], self._pad_id, self._policy.device)
            with self._policy.autocast():
                stats = token_stats(
                    self._policy.model, packed, self._temperature, entropy_grad=bool(self._loss.entropy_coeff)
                )
            if diff is not None:
                diff.add_packed(stats.log_probs.detach(), packed, [batch.rows[place] for place in places])
            loss, metrics = actor_loss(
                LossBatch(
                    log_probs=stats.log_probs,
                    entropy=stats.entropy,
                    old_log_probs=stats.log_probs.detach() if old is None else at(old, places, packed.response_mask),
                    ref_log_probs=None if ref is None else at(ref, places, packed.response_mask),
                    advantages=at(batch.advantages, places, packed.response_mask),
                    mask=packed.response_mask,
                ),
                size,
                self._loss,
            )
            if not finite(loss.detach()):
                fault = f"loss {loss.item()} among {batch.names[places[0]]} ... {batch.names[places[-1]]}"
                break
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(metrics)
        norm = math.nan if fault else self._clip()
        if not fault and not math.isfinite(norm):
            fault = f"gradient norm {norm} over {batch.names[mini[0]]} ... {batch.names[mini[-1]]}"
        if fault:
            self.optimizer.zero_grad(set_to_none=True)
            log.skipped.append(fault)
            return
        self.optimizer.step()
        log.norms.append(norm)
        log.parts.append(summed(parts))

    def _clip(self) -> float:
        parameters = list(self._policy.trainable().values())
        return float(torch.nn.utils.clip_grad_norm_(parameters, self._optim.grad_clip))

    def _metrics(self, log: _Log, diff: _Differences) -> dict[str, float]:
        taken = max(len(log.parts), 1)
        metrics = {name: value / taken for name, value in summed(log.parts).items()}
        if log.norms:
            metrics["actor/grad_norm"] = sum(log.norms) / len(log.norms)
        metrics["actor/lr"] = float(self.schedule.get_last_lr()[0])
        return metrics | diff.metrics()


class _Differences:
    """How far the sampler's probabilities are from the trainer's, over sampled ids (verl's names)."""

    def __init__(self) -> None:
        self._total, self._count, self._worst = 0.0, 0, 0.0

    def add(self, log_probs: Ragged, rows: Sequence[Row]) -> None:
        for values, row in zip(log_probs, rows, strict=True):
            self._take(values, torch.tensor(row.rollout_log_probs, device=values.device))

    def add_packed(self, log_probs: Tensor, packed: PackedRows, rows: Sequence[Row]) -> None:
        sampled = torch.tensor([value for row in rows for value in row.rollout_log_probs], device=log_probs.device)
        self._take(log_probs[packed.response_mask], sampled)

    def _take(self, trainer: Tensor, sampler: Tensor) -> None:
        gap = (trainer.exp() - sampler.exp()).abs()
        if gap.numel():
            self._total += float(gap.sum())
            self._count += gap.numel()
            self._worst = max(self._worst, float(gap.max()))

    def metrics(self) -> dict[str, float]:
        if not self._count:
            return {}
        return {
            "training/rollout_probs_diff_mean": self._total / self._count,
            "training/rollout_probs_diff_max": self._worst,
        }


def mini_batches(group: Tensor, train_batch_size: int, mini_batch_size: int) -> list[list[int]]:
    """Row indices of each mini-batch: whole groups, ``train_batch_size / mini_batch_size`` of them however many rows
    the groups have. A group all of whose rollouts failed has no rows; its mini-batch is smaller, not absent."""
    rows_of: dict[int, list[int]] = {}
    for place, owner in enumerate(group.tolist()):
        rows_of.setdefault(owner, []).append(place)
    out = []
    for start in range(0, train_batch_size, mini_batch_size):
        places = [place for owner in range(start, start + mini_batch_size) for place in rows_of.get(owner, [])]
        if places:
            out.append(places)
    return out


def step_quietly(schedule: Any) -> None:
    """One step of a schedule; torch takes a skipped first optimizer step for calls in the wrong order."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        schedule.step()


def lr_schedule(optimizer: torch.optim.Optimizer, optim: OptimSettings) -> Any:
    """verl's schedule of that name, stepped once a rollout batch; under warm-up its first step has rate 0."""
    from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

    if optim.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(optimizer, optim.lr_warmup_steps)
    if optim.lr_scheduler_type == "cosine":
        return get_cosine_schedule_with_warmup(
            optimizer, optim.lr_warmup_steps, optim.total_training_steps, min_lr_ratio=optim.min_lr_ratio
        )
    raise Refused(f"lr_scheduler_type: got {optim.lr_scheduler_type!r}, expected constant or cosine")


def _bad_advantage(batch: RolloutBatch, mini: Sequence[int]) -> str | None:
    for place in mini:
        values = batch.advantages[place]
        wrong = values[~torch.isfinite(values)]
        if wrong.numel():
            return f"advantage {float(wrong[0])} of {batch.names[place]}"
    return None
