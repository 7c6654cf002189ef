"""The learning half of the gate check: one real optimizer step on a toy policy must raise the rewarded gate.

The toy is a one-layer Qwen2 of 12 tokens, made in memory. Its rows have prompts and responses of unequal lengths, so
that a mask off by one, a denominator per micro-batch or advantages on the wrong rows change the gradient; that gradient
is compared with one computed here row by row, without padding, cache or verl.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from poimen_exp.gates.check_report import Recorder
from poimen_exp.gates.types import Prompt

if TYPE_CHECKING:
    from poimen_exp.solo.losses import LossBatch
    from poimen_exp.solo.rows import Row
    from poimen_exp.solo.settings import LossSettings
    from poimen_exp.solo.task import RolloutBatch
    from poimen_exp.solo.update import Updater

_ENGINES = (
    "transformers.models.qwen2.modeling_qwen2",
    "verl.trainer.ppo.core_algos",
    "verl.utils.torch_functional",
    "verl.workers.config",
    "poimen_exp.solo.gate_task",
    "poimen_exp.solo.update",
)
_PAD, _NO, _YES, _STOP = 0, 1, 2, 3
_TEMPERATURE = 0.7
_LR = 0.005
# (group, prompt ids, how many of them the group shares, response ids, advantage)
_ROWS: tuple[tuple[int, tuple[int, ...], int, tuple[int, ...], float], ...] = (
    (0, (4, 5, 6, 7), 3, (_YES, _STOP), 1.0),
    (0, (4, 5, 6, 8, 9), 3, (_NO, 10, 11, _STOP), -1.0),
    (1, (8, 9, 10), 2, (_NO, _STOP), 0.5),
    (1, (8, 9, 11, 4), 2, (_YES, 5, _STOP), -0.5),
)


@dataclass
class ToyPolicy:
    """The parts of ``solo.policy.Policy`` that an update uses, around any causal language model."""

    model: Any
    device: torch.device

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.trainable().items()}

    @contextmanager
    def using(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        mine = self.state()
        self.model.load_state_dict(dict(state), strict=False)
        try:
            yield
        finally:
            self.model.load_state_dict(mine, strict=False)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        yield


def check_step(loss: LossSettings | None, out: Recorder) -> None:
    """Loss values, log-probs, gradient and effect of one optimizer step.

    Args:
        loss: the run's; the step that must raise the rewarded gate is made with it too. None for verl's defaults.
    """
    with out.section("loss"):
        _check_loss(out)
    with out.section("log_probs"):
        _check_log_probs(out)
    with out.section("step"):
        _check_gradient(out)
        _check_rise(out, plain_loss(), "token-mean")
        if loss is not None and loss != plain_loss():
            _check_rise(out, loss, "the run's loss")


def import_engines() -> None:
    """Loads the modules that the check takes from transformers, verl and the trainer, so that its time is its own."""
    for name in _ENGINES:
        importlib.import_module(name)


def plain_loss() -> LossSettings:
    """verl's default policy loss: clip 0.2, dual clip 3, token-mean, no entropy, no KL."""
    from poimen_exp.solo.settings import LossSettings

    return LossSettings(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        loss_agg_mode="token-mean",
        entropy_coeff=0.0,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        kl_loss_type="low_var_kl",
    )


def toy_model() -> Any:
    """A one-layer Qwen2 with fixed random weights; the global random state is left as it was."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=_PAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Qwen2ForCausalLM(config).float().eval()


def _check_loss(out: Recorder) -> None:
    """10 tokens at advantage 1 and 30 at 0 are -0.25 a token, however they are cut into micro-batches; ratio e is
    clipped to 1.2 at advantage 1; ratio e^2 at advantage -1 is dual-clipped to 3.
    """
    from poimen_exp.solo import losses

    settings, size = plain_loss(), losses.MiniBatchSize(tokens=40, rows=2)
    whole = _loss_batch([10, 30], [1.0, 0.0], 0.0)
    out.equal("10 tokens at 1, 30 at 0", losses.actor_loss(whole, size, settings)[0].item(), -0.25)
    shares = [losses.actor_loss(_loss_batch([n], [a], 0.0), size, settings)[0] for n, a in ((10, 1.0), (30, 0.0))]
    out.equal("the same in two micro-batches", [share.item() for share in shares], (-0.25, 0.0))
    one = losses.MiniBatchSize(tokens=4, rows=1)
    for name, advantage, log_ratio, expected in (
        ("ratio e, advantage 1: clipped", 1.0, 1.0, -1.2),
        ("ratio e^2, advantage -1: dual-clipped", -1.0, 2.0, 3.0),
    ):
        batch = _loss_batch([4], [advantage], log_ratio)
        out.equal(name, losses.actor_loss(batch, one, settings)[0].item(), expected, tolerance=1e-5)
    logit = torch.zeros(2, requires_grad=True)
    chosen = torch.log_softmax(logit, -1)[1].reshape(1, 1)
    batch = _loss_batch([1], [1.0], 0.0, chosen)
    losses.actor_loss(batch, losses.MiniBatchSize(1, 1), settings)[0].backward()  # type: ignore[no-untyped-call]
    assert logit.grad is not None
    out.equal("gradient of a rewarded coin's logits", logit.grad.tolist(), (0.5, -0.5))


def _loss_batch(
    lengths: Sequence[int], advantages: Sequence[float], log_ratio: float, log_probs: Tensor | None = None
) -> LossBatch:
    from poimen_exp.solo.losses import LossBatch

    width = max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    chosen = torch.full(mask.shape, -1.0) if log_probs is None else log_probs
    return LossBatch(
        log_probs=chosen,
        entropy=torch.zeros(mask.shape),
        old_log_probs=chosen.detach() - log_ratio,
        ref_log_probs=None,
        advantages=torch.tensor(advantages)[:, None].expand(mask.shape),  # on padding too: the mask keeps it out
        mask=mask,
    )


def _check_log_probs(out: Recorder) -> None:
    from poimen_exp.solo import forward, rows

    model, toy = toy_model(), _rows()
    with torch.no_grad():
        packed = rows.pack(toy, _PAD, torch.device("cpu"))
        stats = forward.token_stats(model, packed, _TEMPERATURE)
        got = [stats.log_probs[place, : len(row.response)] for place, row in enumerate(toy)]
        plain = [_plain_log_probs(model, row) for row in toy]
    out.equal("of every sampled id", torch.cat(got).tolist(), torch.cat(plain).tolist(), tolerance=1e-4)
    padding = stats.log_probs[~packed.response_mask]
    out.equal("on padding", padding.tolist(), [0.0] * padding.numel(), tolerance=0.0)
    out.equal("ids that count", int(packed.response_mask.sum()), sum(len(row.response) for row in toy))


def _check_gradient(out: Recorder) -> None:
    """The gradient that an update leaves on the weights is that of -sum(advantage x log-prob) / tokens."""
    model = toy_model()
    tokens = sum(len(row[3]) for row in _ROWS)
    objective = -sum(
        (row[4] * _plain_log_probs(model, item).sum() for row, item in zip(_ROWS, _rows(), strict=True)),
        torch.zeros(()),
    )
    wanted = torch.autograd.grad(objective / tokens, list(model.parameters()))
    report = _updater(model, plain_loss(), mini_batch=2, micro_batch_tokens=20).update(_batch())
    out.equal("optimizer steps of one mini-batch", report.taken, 1)
    got = [torch.zeros_like(value) if value.grad is None else value.grad for value in model.parameters()]
    scale = max(float(value.abs().max()) for value in wanted)
    worst = max(float((mine - plain).abs().max()) for mine, plain in zip(got, wanted, strict=True))
    out.equal("largest error of the gradient, relative", worst / scale, 0.0, tolerance=1e-3)
    report = _updater(toy_model(), plain_loss(), mini_batch=1, micro_batch_tokens=1000).update(_batch())
    out.equal("optimizer steps of two mini-batches", report.taken, 2)


def _check_rise(out: Recorder, loss: LossSettings, name: str) -> None:
    model = toy_model()
    before = _gate_probabilities(model)
    _updater(model, loss, mini_batch=2, micro_batch_tokens=20).update(_batch())
    after = _gate_probabilities(model)
    for place, (group, _, _, response, advantage) in enumerate(_ROWS):
        gate = "yes" if response[0] == _YES else "no"
        change, kind = after[place] - before[place], "rewarded" if advantage > 0 else "punished"
        rise = change if advantage > 0 else -change
        out.above(f"{name}: {kind} {gate} of group {group}: probability goes the right way by", rise, 0.0)


def check_rise(out: Recorder, name: str, loss: LossSettings, advantages: Sequence[Tensor]) -> None:
    """One optimizer step on the toy policy over two groups of two one-token responses, the first of each rewarded."""
    from poimen_exp.solo.rows import Row

    rows = [Row(Prompt((4, 5, 6 + place // 2), 2), (_NO if place % 2 else _YES,), (0.0,)) for place in range(4)]
    model = toy_model()

    def probabilities() -> list[float]:
        with torch.no_grad():
            return [float(_plain_log_probs(model, row)[0].exp()) for row in rows]

    before = probabilities()
    batch = replace(_batch(), rows=tuple(rows), group=torch.tensor([0, 0, 1, 1]), advantages=tuple(advantages))
    _updater(model, loss, mini_batch=2, micro_batch_tokens=20).update(batch)
    for place, (old, new) in enumerate(zip(before, probabilities(), strict=True)):
        kind = "other" if place % 2 else "rewarded"
        change = old - new if place % 2 else new - old
        out.above(f"{name}: {kind} token of group {place // 2}: probability goes the right way by", change, 0.0)


def _gate_probabilities(model: Any) -> list[float]:
    with torch.no_grad():
        return [float(_plain_log_probs(model, row)[0].exp()) for row in _rows()]


def _plain_log_probs(model: Any, row: Row) -> Tensor:
    """[R] log-probs of one row's response: one forward, no padding, no cache."""
    ids = torch.tensor([row.prompt.ids + row.response])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt.ids) - 1 : -1] / _TEMPERATURE
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(row.response)[:, None])[:, 0]


def _rows() -> list[Row]:
    from poimen_exp.solo.rows import Row

    return [Row(Prompt(ids, shared), response, (0.0,) * len(response)) for _, ids, shared, response, _ in _ROWS]


def _batch() -> RolloutBatch:
    from poimen_exp.gates.metrics import Means
    from poimen_exp.solo.ragged import spread
    from poimen_exp.solo.task import RolloutBatch

    rows = tuple(_rows())
    return RolloutBatch(
        rows=rows,
        names=tuple(f"toy row {place}" for place in range(len(_ROWS))),
        advantages=spread(torch.tensor([row[4] for row in _ROWS]), rows),
        group=torch.tensor([row[0] for row in _ROWS]),
        metrics=Means(),
        watch=Means(),
        attempted=len(_ROWS),
        failed=0,
        records=(),
    )


def _updater(model: Any, loss: LossSettings, mini_batch: int, micro_batch_tokens: int) -> Updater:
    from poimen_exp.solo.settings import OptimSettings, StepSettings
    from poimen_exp.solo.update import Updater

    policy = ToyPolicy(model, torch.device("cpu"))
    optim = OptimSettings(
        lr=_LR,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        lr_warmup_steps=0,
        lr_scheduler_type="constant",
        min_lr_ratio=0.0,
        grad_clip=1e9,
        total_training_steps=1,
    )
    step = StepSettings(
        train_batch_size=2,
        ppo_mini_batch_size=mini_batch,
        ppo_epochs=1,
        micro_batch_tokens=micro_batch_tokens,
        shuffle=False,
    )
    return Updater(cast(Any, policy), policy.state(), _PAD, _TEMPERATURE, loss, optim, step)
