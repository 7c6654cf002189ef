"""The estimate's arithmetic, by hand and against tensors that were really made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from poimen_exp.config.compose import compose_config
from poimen_exp.gates.types import Prompt
from poimen_exp.solo import estimate as e
from poimen_exp.solo.estimate import GB
from poimen_exp.solo.estimate_inputs import critic_of, measure_rates, model_shape, workload
from poimen_exp.solo.estimate_types import Critic, ModelShape, Rates, Rows, Workload
from poimen_exp.solo.fused import use_fused_lora
from poimen_exp.solo.plan import compile_settings
from poimen_exp.solo.policy import ADAPTER
from poimen_exp.solo.rows import Row, pack
from poimen_exp.solo.settings import (
    FULL_OFFLOAD,
    NO_OFFLOAD,
    CriticSettings,
    ModelSettings,
    OffloadSettings,
    OptimSettings,
)
from poimen_exp.solo.slots import use_grouped_attention
from poimen_exp.wording import hours, size

from .support import MODEL

SHAPE = ModelShape(
    parameters=1000,
    linear=800,
    lora=60,
    rank=2,
    layers=2,
    hidden=8,
    intermediate=16,
    heads=2,
    kv_heads=1,
    head_size=4,
    vocabulary=10,
    dtype_bytes=2,
)
ROWS = Rows(prefix=6, suffix=2, response=4, share=2)  # 12 tokens
WORK = Workload(
    mean=ROWS,
    longest=ROWS,
    rows=8,
    rollouts=4,
    turns=2,
    val_rows=6,
    val_rollouts=3,
    mini_rows=8,
    max_rows=5,
    micro_batch_tokens=30,
    forwards=1,
    backwards=1,
    steps=3,
    validations=2,
)
RATES = Rates(flops=1000, bytes=100, launch_s=0.5, efficiency=0.5)


def test_a_micro_batch_takes_rows_until_its_padded_tokens_are_spent() -> None:
    # 1 row: 6 + 6; 2: 6 + 12; 3 need a second prefix: 12 + 18 = 30; 4: 12 + 24 = 36.
    assert [e.micro_batch_rows(ROWS, budget, 8) for budget in (1, 17, 18, 29, 30, 36)] == [1, 1, 2, 2, 3, 4]
    assert e.micro_batch_rows(ROWS, 10_000, 8) == 8


def test_bytes_of_a_token_in_both_types() -> None:
    assert e.kv_bytes(SHAPE) == 32  # 2 x 2 layers x 4 x 2 bytes
    assert e.token_bytes(SHAPE) == 8 * 8 + 6 * 8 + 8 * 16 + 28 + 8 + 8
    assert e.token_bytes(replace(SHAPE, dtype_bytes=4)) == 16 * 8 + 12 * 8 + 16 * 16 + 56 + 8 + 8
    assert e.mask_bytes(SHAPE) == 4  # two heads of a group, 2 bytes


def test_bytes_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e, "HEAD_CHUNK", 25)
    assert e.head_bytes(SHAPE, 4, entropy=False) == 40 * 6 + 25 * 12
    assert e.head_bytes(SHAPE, 2, entropy=False) == 20 * 6 + 20 * 12
    assert e.head_bytes(SHAPE, 4, entropy=True) == 40 * 26


def test_memory_by_hand() -> None:
    found = e.memory(SHAPE, WORK)
    assert found.weights == 2 * 1000 * 2
    assert found.adapter == 60 * 20
    assert found.cache == 4 * 64 * 32  # four rows of 12 + 1 + 1 columns, in 64s
    assert found.sampling == 24 * 32 + 24 * (48 + 32) * 2  # four prefixes kept, and read in one forward
    # 3 rows, 2 prefixes; a layer: 30 tokens, 36 + 12 looked at, 18 x 12 and 2 x 6 x 6 of mask; then 12 logits of 10
    assert found.update == 2 * (30 * 284 + 48 * 16 + (18 * 12 + 2 * 36) * 4) + 12 * 10 * (6 + 12)
    assert found.peak == 4000 + 1200 + 8192 + 23_040


def test_the_larger_of_sampling_and_update_counts() -> None:
    narrow = e.memory(SHAPE, replace(WORK, micro_batch_tokens=1, rows=4000, rollouts=2000, max_rows=1))
    assert narrow.sampling > narrow.update
    assert narrow.peak == narrow.weights + narrow.adapter + narrow.cache + narrow.sampling


def test_vllm_brings_its_own_weights_and_sleeps_during_updates() -> None:
    for share in (1000, 50_000):
        found = e.memory(SHAPE, replace(WORK, engine_bytes=share))
        assert found.cache == 0
        assert found.peak == 4000 + 1200 + max(share, 23_040)


def test_slots_take_half_of_what_a_gpu_has_free() -> None:
    # 10,000 less 4,000 of weights and 1,200 of the adapter
    assert e.memory(SHAPE, replace(WORK, device_bytes=10_000)).cache == 2400
    assert e.memory(SHAPE, replace(WORK, device_bytes=100_000)).cache == 8192


def critic(parameters: int, trained: int, epochs: int = 1) -> Critic:
    return Critic(SHAPE, parameters, trained, mini_rows=8, micro_batch_tokens=30, epochs=epochs)


def test_a_critic_adds_its_weights_and_its_optimizer() -> None:
    wide = replace(critic(900, 900), micro_batch_tokens=40)  # 3 rows of 12 tokens
    trained, adapted = e.memory(SHAPE, WORK, wide), e.memory(SHAPE, WORK, critic(950, 50))
    assert (trained.critic, adapted.critic) == (900 * 16, 900 * 2 + 50 * 16)
    assert trained.peak == 4000 + 1200 + 14_400 + 8192 + 24_480  # the critic's micro-batch is the widest


def test_offloaded_roles_count_in_their_own_phase_only() -> None:
    # Base 2,000; actor 2,000 + 60 x 16, reference 60 x 4; critic 900 x 16, and 16,320 of its update.
    value = critic(900, 900)
    whole = e.memory(SHAPE, WORK, value, FULL_OFFLOAD)
    assert (whole.weights, whole.adapter, whole.critic) == (4000, 1200, 14_400)
    critic_phase = 14_400 + e.critic_update_bytes(value, ROWS)
    assert whole.peak == max(2000 + 8192 + whole.sampling, 2000 + 960 + 23_040, critic_phase)
    assert whole.peak == critic_phase == 14_400 + 16_320
    # The critic stays in the actor's phase, with the reference; sampler and slots do not.
    assert e.memory(SHAPE, WORK, value, OffloadSettings(actor=True)).peak == 14_400 + 240 + 2000 + 960 + 23_040


def test_an_offloaded_optimizer_leaves_weights_and_gradients() -> None:
    # Of 500 trained weights 8 bytes stay while the actor learns, which is the fullest phase then.
    found = e.memory(SHAPE, WORK, critic(500, 500), OffloadSettings(critic_optimizer=True))
    assert found.peak == 4000 + 1200 + 8192 + 500 * 8 + 23_040


def test_an_offloaded_sampler_beside_vllm_never_comes() -> None:
    found = e.memory(SHAPE, replace(WORK, engine_bytes=50_000), None, OffloadSettings(actor=True))
    assert found.peak == 50_000 + 60 * 8 + 240


def test_slots_take_half_of_what_the_offloaded_leave() -> None:
    # 8,000 less 2,000 of the sampler; less 4,000 and 1,200 where nothing is offloaded
    work = replace(WORK, device_bytes=8000)
    assert [e.memory(SHAPE, work, None, offload).cache for offload in (FULL_OFFLOAD, NO_OFFLOAD)] == [3000, 1400]


def test_all_is_offloaded_where_the_run_fits_so_and_not_otherwise() -> None:
    value = critic(900, 900)

    def needed(device_bytes: int, asked: OffloadSettings = NO_OFFLOAD) -> OffloadSettings:
        return e.needed_offload(SHAPE, replace(WORK, device_bytes=device_bytes), value, asked)

    # Without: 4,000 + 1,200 + 14,400 + slots + 28,176; with: 34,560.
    assert needed(60_000) == NO_OFFLOAD
    assert needed(40_000) == FULL_OFFLOAD
    assert needed(40_000, OffloadSettings(reference=True)) == FULL_OFFLOAD
    assert needed(30_000) == NO_OFFLOAD  # it would not help
    assert needed(0) == NO_OFFLOAD  # a CPU


def test_a_critic_reads_prompts_whole() -> None:
    # 2 rows of 12 tokens under 30; a token: 364, 32 of keys and values, 12 x 2 of mask; two layers
    assert e.critic_update_bytes(critic(900, 900), ROWS) == 2 * 24 * (284 + 32 + 24)


def test_a_critic_takes_its_passes() -> None:
    # 96 tokens that look at 6: 96 x 2,104. All weights trained: values, forward, backward twice; LoRA: once.
    assert e.critic_seconds(critic(900, 900), WORK, RATES) == pytest.approx(4 * 96 * 2_104 / 500)
    assert e.critic_seconds(critic(950, 50, epochs=2), WORK, RATES) == pytest.approx(5 * 96 * 2_104 / 500)


def test_seconds_by_hand() -> None:
    # forward of 10 tokens that look at 6, with 4 logits: 10 x (2 x 860 + 4 x 2 x 8 x 6) + 2 x 4 x 8 x 10
    assert e.forward_flops(SHAPE, 10, 6, 4) == 21_680
    # update: 8 x (6 / 2 + 6) = 72 tokens: 156,608; one pass without and one with gradient are three forwards
    assert e.update_seconds(SHAPE, WORK, RATES) == pytest.approx(3 * 156_608 / 500)
    # prefill of 40 tokens: 80,320 / 500; 8 decoding steps that each read 2,000 + 4 x 12 x 32 bytes
    assert e.rollout_seconds(SHAPE, WORK, 8, 4, RATES) == pytest.approx(80_320 / 500 + 8 * 35.36)


def test_a_decoding_step_takes_as_long_as_its_slowest_part() -> None:
    prefill = 80_320 / 500
    slow_matrix = replace(RATES, bytes=1e9, launch_s=0.0)
    assert e.rollout_seconds(SHAPE, WORK, 8, 4, slow_matrix) == pytest.approx(prefill + 8 * 10_592 / 500)
    slow_launch = replace(RATES, bytes=1e9, launch_s=10.0)
    assert e.rollout_seconds(SHAPE, WORK, 8, 4, slow_launch) == pytest.approx(prefill + 8 * 15 * 2 * 10.0)


def test_a_run_is_its_steps_and_its_validations() -> None:
    found = e.estimate(SHAPE, WORK, RATES)
    assert (found.tokens_per_step, found.sampled_per_step) == (96, 32)
    assert found.tokens_per_run == 3 * 96 + 2 * 6 * 12
    seconds = 3 * (found.rollout_s + found.update_s) + 2 * e.rollout_seconds(SHAPE, WORK, 6, 3, RATES)
    assert found.hours == pytest.approx(seconds / 3600)


def test_the_printed_lines_have_the_assumptions() -> None:
    tokens, hours = e.lines(e.estimate(SHAPE, WORK, RATES), 3, "cpu: test")
    assert tokens.startswith("estimate: at most 96 tokens a step (32 sampled), 432 in 3 steps; peak memory 0.0")
    assert " MB (weights " in tokens
    assert "of which 50% are assumed" in hours
    assert "measured on cpu: test" in hours
    offloaded = e.estimate(SHAPE, WORK, RATES, None, FULL_OFFLOAD)
    assert " MB; offloaded roles take turns)" in e.lines(offloaded, 3, "cpu: test")[0]


def test_small_numbers_are_printed_in_small_units() -> None:
    assert [size(count) for count in (1.534 * 2**30, 3.2 * 2**20)] == ["1.53 GB", "3.2 MB"]
    assert [hours(count_s) for count_s in (5400, 313.4, 0.2844)] == ["1.5 h", "313 s", "0.28 s"]


def test_a_run_that_goes_on_is_estimated_by_the_steps_that_are_left() -> None:
    settings, _ = compile_settings(compose_config(["+experiment=quickstart", "trainer.test_freq=10"]))  # 40 steps
    work = workload(settings, [ROWS], 1, 1, 3)
    assert (work.steps, work.validations) == (40, 5)  # at 0, 10, 20, 30, 40
    work = workload(settings, [ROWS], 1, 1, 3, done=20)
    assert (work.steps, work.validations) == (20, 2)


# Peaks measured on one H200 (docs/results/solo-h200.md), GiB. 135M: SmolLM2-135M; 3B: the sizes of Qwen2.5-3B.
# Rows of the benchmark: 256 + 256, the last prompt id not shared; of the gates: about 590 shared ids (text, question,
# 512 of the chunk), 85 of memory and form, and up to 104 sampled.
BENCH, GATES = Rows(prefix=255, suffix=1, response=256, share=8), Rows(prefix=590, suffix=85, response=104, share=8)
RECORDED = [
    ("135M", BENCH, 128, 128, 32_768, 33.2),
    ("135M", GATES, 1024, 4 * 8 * 5, 32_768, 34.8),
    ("3B", BENCH, 0, 128, 8_192, 53.1),
    ("3B", BENCH, 0, 128, 16_384, 91.7),
]
SIZES = {"135M": (30, 576, 1536, 9, 3, 64, 49_152), "3B": (36, 2048, 11_008, 16, 2, 128, 151_936)}


@pytest.mark.parametrize(("model", "rows", "sampled", "mini", "budget", "measured"), RECORDED)
def test_the_peak_of_recorded_gpu_runs_is_predicted_within_20_percent(
    model: str, rows: Rows, sampled: int, mini: int, budget: int, measured: float
) -> None:
    layers, hidden, inner, heads, kv_heads, size, vocabulary = SIZES[model]
    inputs, kv = heads * size, kv_heads * size
    linear = layers * (2 * hidden * inputs + 2 * hidden * kv + 3 * hidden * inner)
    shape = ModelShape(
        parameters=linear + vocabulary * hidden + (2 * layers + 1) * hidden,
        linear=linear,
        lora=16 * layers * (2 * (hidden + inputs) + 2 * (hidden + kv) + 3 * (hidden + inner)),
        rank=16,
        layers=layers,
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        vocabulary=vocabulary,
        dtype_bytes=2,
    )
    work = replace(WORK, longest=rows, mini_rows=mini, micro_batch_tokens=budget, max_rows=sampled, rollouts=128)
    assert e.memory(shape, work).peak / GB == pytest.approx(measured, rel=0.2)


# --- against real tensors -----------------------------------------------------------------------------------------


def tiny_llama(dtype: torch.dtype, layers: int) -> Any:
    """Grouped heads, no biases; LoRA of rank 4 on every layer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    base = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval().requires_grad_(False)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))
    for value in model.parameters():
        if value.requires_grad:
            value.data = value.data.float()
    use_grouped_attention(base)
    if dtype != torch.float32:
        use_fused_lora(model, ADAPTER)
    return model.eval()


def saved_bytes(model: Any, dtype: torch.dtype, rows: list[Row]) -> int:
    """What autograd keeps of one forward of the update beside the weights."""
    from poimen_exp.solo.forward import token_stats

    weights = {value.untyped_storage().data_ptr() for value in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in weights:
            kept.setdefault(value.untyped_storage().data_ptr(), value)
        return value

    cast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value), cast:
        token_stats(model, pack(rows, 0, torch.device("cpu")), 1.0)
    return sum(value.untyped_storage().nbytes() for value in kept.values())


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)], ids=["bfloat16", "float32"])
def test_activations_of_a_layer_are_what_autograd_keeps_of_it(dtype: torch.dtype, size: int) -> None:
    # Six rows over two prefixes of 40 and 30 ids (so that there is padding), 7 prompt ids and 11 of the response.
    prefixes = [tuple(range(3, 43)), tuple(range(50, 80))]
    rows = [
        Row(Prompt((*prefix, *range(5, 12)), len(prefix)), tuple(range(9, 20)), (0.0,) * 11)
        for prefix in prefixes
        for _ in range(3)
    ]
    one, two = (saved_bytes(tiny_llama(dtype, layers), dtype, rows) for layers in (1, 2))
    shape = ModelShape(0, 0, 0, 4, 1, 64, 160, 4, 2, 16, 320, size)
    longest = Rows(prefix=40, suffix=7, response=11, share=3)
    counted = e.update_bytes(shape, replace(WORK, longest=longest, mini_rows=6, micro_batch_tokens=10_000))
    layer = counted - e.head_bytes(shape, 6 * 11, entropy=False)
    if size == 2:  # norms are transformers' own here: the fused one of a GPU keeps no float32 copy of its input
        layer += (2 * 40 + 6 * 18) * 4 * 64
        # LoRA's weights are cast too, once for prefixes and once for rows: nothing beside real token counts.
        layer += 2 * 2 * 4 * (4 * 64 + 2 * (64 + 32) + 3 * (64 + 160))
    assert two - one == layer


def settings(rank: int = 8, targets: tuple[str, ...] | str = "all-linear") -> ModelSettings:
    return ModelSettings(Path(MODEL), rank, 16, targets, "float32", "sdpa", None)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), r".*layers\.1\.mlp\..*_proj"])
def test_parameters_and_lora_are_those_of_the_model_that_trains(targets: tuple[str, ...] | str) -> None:
    from poimen_exp.solo.policy import Policy

    policy = Policy(settings(targets=targets), torch.device("cpu"))
    shape = model_shape(settings(targets=targets))
    assert shape.parameters == sum(value.numel() for value in policy.sampler.parameters())
    assert shape.lora == sum(value.numel() for value in policy.trainable().values())
    assert shape.linear == 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)  # q, o; k, v of one head; the MLP


def test_key_value_bytes_are_those_of_a_cache_that_was_filled() -> None:
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.ones((3, 5), dtype=torch.int64), past_key_values=cache, use_cache=True)
    made = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert made == 3 * 5 * e.kv_bytes(model_shape(settings()))


def test_the_slots_of_the_engine_have_the_bytes_that_were_counted() -> None:
    from transformers import AutoModelForCausalLM

    from poimen_exp.solo.slots import Slots

    slots = Slots(AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True))
    slots.reserve(4, 300 + 300 // 8)
    work = replace(WORK, longest=Rows(200, 40, 60, 2))
    assert slots.kv.nbytes == e.cache_bytes(model_shape(settings()), work)


@pytest.mark.parametrize("rank", [0, 8])
def test_a_critics_weights_are_those_of_the_value_model(rank: int) -> None:
    from poimen_exp.solo.critic import Critic as ValueModel

    chosen = CriticSettings(
        path=Path(MODEL),
        lora_rank=rank,
        lora_alpha=16,
        target_modules="all-linear",
        dtype="float32",
        attn_implementation="sdpa",
        optim=OptimSettings(1e-3, 0.0, (0.9, 0.999), 0, "constant", 0.0, 1.0, 10),
        ppo_mini_batch_size=4,
        ppo_epochs=1,
        micro_batch_tokens=100,
        cliprange_value=0.5,
        loss_agg_mode="token-mean",
    )
    made = ValueModel(chosen, 0, 4, torch.device("cpu"))
    run = SimpleNamespace(critic=chosen, rollout=SimpleNamespace(group_size=2))
    counted = critic_of(run, 1.0)  # type: ignore[arg-type]
    assert counted is not None
    assert counted.parameters == sum(value.numel() for value in made.model.parameters())
    assert counted.trained == sum(value.numel() for value in made.trainable().values())
    assert counted.mini_rows == 8


def test_rates_of_this_machine_are_plausible() -> None:
    rates = measure_rates(torch.device("cpu"), "float32")
    assert 1e8 < rates.flops < 1e15
    assert 1e7 < rates.bytes < 1e13
    assert 0 < rates.launch_s < 0.1
