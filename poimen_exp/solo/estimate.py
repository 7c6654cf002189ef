"""What a solo run will cost, before it runs: tokens, hours, peak memory. Pure arithmetic; sizes come from elsewhere.

Letters: H hidden size, I intermediate size, A heads x head size, K key heads x head size, V vocabulary, L layers,
r LoRA rank; b bytes of an activation (2 in bfloat16, 4 in float32). A row is a prompt with its response: P tokens that
rows of one group share, S other prompt tokens, R response tokens, T = P + S + R. N rows stand in one forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from poimen_exp.solo.estimate_types import Critic, ModelShape, Rates, Rows, Workload
from poimen_exp.solo.settings import FULL_OFFLOAD, NO_OFFLOAD, OffloadSettings
from poimen_exp.wording import counted, hours, seconds, size

GB = 2**30  # as perf/max_memory_allocated_gb has it
ADAM_BYTES = 16
"""A trained number in float32: weight, gradient, two moments."""
REFERENCE_BYTES = 4
"""The adapter that KL is measured against, kept beside the trained one."""
HEAD_COPIES = 3
"""Of a logit that is trained through, in the base's type: itself, its gradient, and that among the padded ones."""
HEAD_CHUNK = 2**28
HEAD_CHUNK_BYTES = 12
"""Logits that are worked on at a time, and what each then takes: scaled, its exponential and a product, in float32."""
ENTROPY_BYTES = 20
"""Peak of a logit where entropy is trained too, all at once: scaled and softmax kept (4 + 4), three gradients."""
DRAW_BYTES = 16
"""Peak of a logit that is sampled from: scaled, log-softmax, probabilities, and a copy (float32 each)."""
PREFILL_TOKENS = 65_536
KEPT_PREFIX_TOKENS = 262_144
"""The engine's limits on one prefill forward and on prefixes kept for rollouts that come later."""
COLUMN_STEP = 64


@dataclass(frozen=True)
class Memory:
    """Bytes; ``peak`` is weights + adapter + critic + cache + the larger of ``sampling``, ``update``.

    Where roles are offloaded it is less: the fullest phase of ``peak_bytes``.
    """

    weights: int
    adapter: int
    critic: int
    cache: int
    sampling: int
    update: int
    peak: int


@dataclass(frozen=True)
class Role:
    """Bytes of a role: in its own phase ``whole``, and ``busy`` for what it does there; ``stays`` in all others."""

    whole: int
    busy: int
    stays: int


@dataclass(frozen=True)
class Estimate:
    """Tokens are upper bounds: every document read to its end, every response as long as it may be."""

    tokens_per_step: int
    sampled_per_step: int
    tokens_per_run: int
    memory: Memory
    rates: Rates
    rollout_s: float
    update_s: float
    hours: float
    offload: OffloadSettings


def estimate(
    model: ModelShape, work: Workload, rates: Rates, critic: Critic | None = None, offload: OffloadSettings = NO_OFFLOAD
) -> Estimate:
    """The cost of a run.

    A step's time is that of its rollouts (``rollout_seconds``) and its update (``update_seconds``); a validation is a
    rollout of its own rows. Moves are not counted.
    """
    tokens = round(work.rows * work.mean.tokens)
    val_tokens = round(work.val_rows * work.mean.tokens)
    rollout = rollout_seconds(model, work, work.rows, work.rollouts, rates)
    update = update_seconds(model, work, rates) + (0.0 if critic is None else critic_seconds(critic, work, rates))
    validation = rollout_seconds(model, work, work.val_rows, work.val_rollouts, rates) if work.validations else 0.0
    seconds = work.steps * (rollout + update) + work.validations * validation
    return Estimate(
        tokens_per_step=tokens,
        sampled_per_step=round(work.rows * work.mean.response),
        tokens_per_run=work.steps * tokens + work.validations * val_tokens,
        memory=memory(model, work, critic, offload),
        rates=rates,
        rollout_s=rollout,
        update_s=update,
        hours=seconds / 3600,
        offload=offload,
    )


def needed_offload(
    model: ModelShape, work: Workload, critic: Critic | None, offload: OffloadSettings
) -> OffloadSettings:
    """``offload``, or all of it where a GPU has room for the run with it and not without."""
    room = work.device_bytes
    fits = [memory(model, work, critic, choice).peak <= room for choice in (offload, FULL_OFFLOAD)]
    return FULL_OFFLOAD if fits == [False, True] else offload


def memory(
    model: ModelShape, work: Workload, critic: Critic | None = None, offload: OffloadSettings = NO_OFFLOAD
) -> Memory:
    """Peak of a run's tensors.

    weights = 2 x parameters x b: the trained model's frozen base, and the copy that samples (vLLM has a third in its
    share). adapter = lora x (16 + 4): Adam in float32, and the reference. critic = frozen x b + trained x 16. The cache
    of the rows being written stays while the update runs unless the sampler is offloaded; vLLM sleeps then, and an
    offloaded sampler beside it never comes.
    """
    base = model.parameters * model.dtype_bytes
    actor = _trained_role(base, model.lora, update_bytes(model, work), offload.actor, offload.actor_optimizer)
    value = Role(0, 0, 0) if critic is None else _critic_role(critic, work.longest, offload)
    reference = model.lora * REFERENCE_BYTES
    shared = 0 if offload.reference else reference
    cache, sampling = cache_bytes(model, work), sampling_bytes(model, work)
    if work.device_bytes:
        cache = min(cache, max(0, work.device_bytes - base - actor.stays - value.stays - shared) // 2)
    copy = base
    if work.engine_bytes:
        cache, sampling = 0, work.engine_bytes
        copy = 0 if offload.actor else base
    sampler = Role(copy + cache, sampling, 0 if offload.actor else copy + cache)
    return Memory(
        weights=2 * base,
        adapter=model.lora * ADAM_BYTES + reference,
        critic=value.whole,
        cache=cache,
        sampling=sampling,
        update=max(actor.busy, value.busy),
        peak=shared + peak_bytes([sampler, actor, value]),
    )


def peak_bytes(roles: Sequence[Role]) -> int:
    """The fullest phase: one role whole and busy, of the others what stays."""
    stay = sum(role.stays for role in roles)
    return max(stay - role.stays + role.whole + role.busy for role in roles)


def _trained_role(frozen_bytes: int, trained: int, busy: int, moves: bool, state_moves: bool) -> Role:
    """Weights and gradients are half of ``ADAM_BYTES``, the two moments the other."""
    half = trained * ADAM_BYTES // 2
    stays = (0 if moves else frozen_bytes + half) + (0 if state_moves else half)
    return Role(frozen_bytes + 2 * half, busy, stays)


def _critic_role(critic: Critic, longest: Rows, offload: OffloadSettings) -> Role:
    """A fully trained critic has no frozen part: its weights are float32."""
    frozen = (critic.parameters - critic.trained) * critic.shape.dtype_bytes
    busy = critic_update_bytes(critic, longest)
    return _trained_role(frozen, critic.trained, busy, offload.critic, offload.critic_optimizer)


def kv_bytes(model: ModelShape) -> int:
    """Keys and values of one token: 2 x L x K x b."""
    return 2 * model.layers * model.kv_heads * model.head_size * model.dtype_bytes


def cache_bytes(model: ModelShape, work: Workload) -> int:
    """Slots of the rows written at once: rows x columns x ``kv_bytes``; columns are 9/8 of the longest row, in 64s."""
    longest = math.ceil(work.longest.tokens)
    columns = -(-(longest + longest // 8 + 1) // COLUMN_STEP) * COLUMN_STEP
    return min(work.max_rows, max(work.rollouts, work.val_rollouts)) * columns * kv_bytes(model)


def sampling_bytes(model: ModelShape, work: Workload) -> int:
    """Kept prefixes, and the larger of a prefill forward, (3I + 4H) b a token, and a draw, 16 V a row."""
    prefixes = math.ceil(work.rows / work.longest.share) * work.longest.prefix
    kept = min(KEPT_PREFIX_TOKENS, prefixes) * kv_bytes(model)
    width = (3 * model.intermediate + 4 * model.hidden) * model.dtype_bytes
    prefill = min(PREFILL_TOKENS, max(prefixes, work.rollouts * work.longest.suffix)) * width
    draw = min(work.max_rows, max(work.rollouts, work.val_rollouts)) * model.vocabulary * DRAW_BYTES
    return math.ceil(kept + max(prefill, draw))


def update_bytes(model: ModelShape, work: Workload) -> int:
    """A forward and backward of the widest micro-batch: activations of its tokens, logits of its responses."""
    longest = work.longest
    rows = micro_batch_rows(longest, work.micro_batch_tokens, work.mini_rows)
    prefixes = math.ceil(rows / longest.share) if longest.prefix else 0
    own = rows * (longest.suffix + longest.response)
    layer = (own + prefixes * longest.prefix) * token_bytes(model)
    read = prefixes * longest.prefix + rows * longest.tokens  # each row has its own copy of keys and values
    layer += read * 2 * model.kv_heads * model.head_size * model.dtype_bytes
    layer += (own * longest.tokens + prefixes * longest.prefix**2) * mask_bytes(model)
    return math.ceil(model.layers * layer + head_bytes(model, rows * longest.response, work.entropy))


def head_bytes(model: ModelShape, sampled: float, entropy: bool) -> float:
    """Logits of so many sampled ids."""
    logits = sampled * model.vocabulary
    if entropy:
        return logits * (HEAD_COPIES * model.dtype_bytes + ENTROPY_BYTES)
    return logits * HEAD_COPIES * model.dtype_bytes + min(logits, HEAD_CHUNK) * HEAD_CHUNK_BYTES


def mask_bytes(model: ModelShape) -> int:
    """What attention keeps of one pair of a token and one that it may look at: a number for every head of a group."""
    return model.heads // model.kv_heads * model.dtype_bytes


def critic_update_bytes(critic: Critic, longest: Rows) -> int:
    """The critic's widest micro-batch: as the actor's, but every prompt is read whole, and a token has one number."""
    whole = replace(longest, prefix=0, suffix=longest.prefix + longest.suffix)
    shape, rows = critic.shape, micro_batch_rows(whole, critic.micro_batch_tokens, critic.mini_rows)
    repeated = 2 * shape.heads * shape.head_size * shape.dtype_bytes  # transformers gives every head its own keys
    layer = rows * longest.tokens * (token_bytes(shape) + repeated + longest.tokens * shape.dtype_bytes)
    return math.ceil(shape.layers * layer)


def micro_batch_rows(rows: Rows, token_budget: int, most: int) -> int:
    """Most rows N of one micro-batch: ceil(N / share) P + N (S + R) within the budget; a row alone may pass it."""
    count = 1
    while count < most:
        wanted = count + 1
        if math.ceil(wanted / rows.share) * rows.prefix + wanted * (rows.suffix + rows.response) > token_budget:
            break
        count = wanted
    return count


def token_bytes(model: ModelShape) -> int:
    """What a layer keeps of one token for the backward pass of LoRA over a frozen base.

    In bfloat16: 8H + 6A + 8I + 14r + 4 heads + 8 bytes. Two norms keep their input and what they give (8H); attention
    keeps query, output and its order for the next layer (6A) and its normalizer (4 a head); the MLP keeps gate, its
    activation, up and their product (8I); every adapted layer its A output (14r). Keys and values are counted apart.
    In float32 norms are transformers' own, and LoRA layers peft's: 16H + 12A + 16I + ...
    """
    h, a, i = model.hidden, model.heads * model.head_size, model.intermediate
    small = 7 * model.rank * model.dtype_bytes + 4 * model.heads + 8
    if model.dtype_bytes == 2:
        return 8 * h + 6 * a + 8 * i + small
    return 16 * h + 12 * a + 16 * i + small


def forward_flops(model: ModelShape, tokens: float, context: float, logits: float) -> float:
    """2 (linear + lora) a token, 4 L A for each token it looks at, 2 H V for each logit row."""
    per_token = 2 * (model.linear + model.lora) + 4 * model.layers * model.heads * model.head_size * context
    return tokens * per_token + 2 * logits * model.hidden * model.vocabulary


def update_seconds(model: ModelShape, work: Workload, rates: Rates) -> float:
    """Passes without gradient cost one forward, with gradient two: a frozen base needs no weight gradients."""
    rows = work.mean
    computed = work.rows * (rows.prefix / rows.share + rows.suffix + rows.response)
    forward = forward_flops(model, computed, rows.tokens / 2, work.rows * rows.response)
    return (work.forwards + 2 * work.backwards) * forward / (rates.flops * rates.efficiency)


def critic_seconds(critic: Critic, work: Workload, rates: Rates) -> float:
    """Its passes over whole rows; the head gives one number a token."""
    rows = work.mean
    forward = forward_flops(critic.shape, work.rows * rows.tokens, rows.tokens / 2, 0)
    return critic.passes * forward / (rates.flops * rates.efficiency)


def rollout_seconds(model: ModelShape, work: Workload, rows: int, rollouts: int, rates: Rates) -> float:
    """Prefill of every prompt (shared prefixes once), then decoding steps.

    Steps: those of the longest reading, turns x R, or all sampled tokens over the rows written at once, whichever is
    more. A step reads all weights and the live rows' keys and values, computes its tokens, and launches about fifteen
    operations a layer: the slowest of the three counts.
    """
    lengths = work.mean
    prompts = rows * (lengths.prefix / lengths.share + lengths.suffix)
    speed = rates.flops * rates.efficiency
    prefill = forward_flops(model, prompts, (lengths.prefix + lengths.suffix) / 2, rows) / speed
    live = max(1, min(work.max_rows, rollouts))
    steps = max(work.turns * lengths.response, rows * lengths.response / live)
    read = model.parameters * model.dtype_bytes + live * lengths.tokens * kv_bytes(model)
    compute = forward_flops(model, live, lengths.tokens, live) / speed
    step = max(read / rates.bytes, compute, 15 * model.layers * rates.launch_s)
    return prefill + steps * step


def lines(found: Estimate, steps: int, device: str, done: int = 0) -> list[str]:
    """The estimate as it is printed before a run of ``steps``, of which ``done`` lie behind it."""
    m = found.memory
    parts = {"weights": m.weights, "adapter": m.adapter, "critic": m.critic, "cache": m.cache, "update": m.update}
    shown = ", ".join(f"{name} {size(part)}" for name, part in parts.items() if part)
    shown += "; offloaded roles take turns" if any(asdict(found.offload).values()) else ""
    counted_steps = f"{steps - done} of {steps} steps" if done else counted(steps, "step")
    return [
        f"estimate: at most {found.tokens_per_step:,} tokens a step ({found.sampled_per_step:,} sampled), "
        f"{found.tokens_per_run:,} in {counted_steps}; peak memory {size(m.peak)} ({shown})",
        f"estimate: {hours(found.hours * 3600)} if all is read to the end and responses are full "
        f"({seconds(found.rollout_s)} rollout, {seconds(found.update_s)} update a step), "
        f"from {found.rates.flops / 1e12:.3g} TFLOP/s, "
        f"of which {found.rates.efficiency:.0%} are assumed, and {found.rates.bytes / 1e9:.3g} GB/s "
        f"measured on {device}",
    ]
