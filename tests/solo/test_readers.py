"""The straight reader: what transformers reads, for every build that it takes, and for no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poimen_exp.gates.types import Prompt, Sampling
from poimen_exp.solo.engine import Request, TransformersEngine
from poimen_exp.solo.readers import PlainReader, StraightReader, reader_of
from poimen_exp.solo.rows import pad_left
from poimen_exp.solo.slots import Slots, SlotView

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}


def model_of(build: str, **changes: Any) -> Any:
    """Random weights throughout, norms and biases too: transformers starts those at 1 and 0."""
    import transformers

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{build}Config")(**(SIZES | heads | changes))
    torch.manual_seed(0)
    model = getattr(transformers, f"{build}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data = torch.rand_like(parameter) + 0.2
    return model


MODELS = {
    "qwen2": lambda: model_of("Qwen2", tie_word_embeddings=True),
    "llama": lambda: model_of("Llama"),
    "llama with biases": lambda: model_of("Llama", attention_bias=True, mlp_bias=True),
    "llama of one key head": lambda: model_of("Llama", num_key_value_heads=1),
    "llama without groups": lambda: model_of("Llama", num_key_value_heads=4),
    "llama of wide heads": lambda: model_of("Llama", head_dim=10, hidden_act="gelu"),
    "llama 3's positions": lambda: model_of(
        "Llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [1, 5])
@torch.inference_mode()
def test_logits_keys_and_values_are_transformers_own(name: str, width: int) -> None:
    """Three rows at unequal positions: a decoding step, and the rest of a prompt."""
    model, source = MODELS[name](), torch.Generator().manual_seed(1)
    ids = torch.randint(40, (3, width), generator=source)
    position = torch.tensor([[2], [9], [4]]) + torch.arange(width)
    slots = Slots(model)
    slots.reserve(3, 14)
    slots.kv.normal_(generator=source)
    mine, plain = slots.kv, slots.kv.clone()
    reader = reader_of(model)
    assert isinstance(reader, StraightReader)
    got = reader.logits(ids, position, SlotView(mine, slice(0, 3), 14, position))
    wanted = PlainReader(model).logits(ids, position, SlotView(plain, slice(0, 3), 14, position))
    assert wanted.std() > 0.3
    assert torch.allclose(got, wanted, atol=1e-4)
    assert torch.allclose(mine, plain, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_prefixes_of_unequal_lengths_are_transformers_own(name: str) -> None:
    model = MODELS[name]()
    ids, mask = pad_left([(5, 6, 7, 8, 9, 10), (11,), (12, 13, 14)], 0, torch.device("cpu"))
    got = reader_of(model).prefixes(ids, mask, [6, 1, 3])
    wanted = PlainReader(model).prefixes(ids, mask, [6, 1, 3])
    assert [side.shape[3] for side in got] == [6, 1, 3]
    for side, other in zip(got, wanted, strict=True):
        assert torch.allclose(side, other, atol=1e-4)


def test_only_what_the_straight_reader_knows_is_read_by_it() -> None:
    """Qwen3 has norms of its own on queries and keys; in bfloat16 transformers rounds in other places."""
    assert isinstance(reader_of(model_of("Qwen3")), PlainReader)
    assert isinstance(reader_of(model_of("Qwen2").bfloat16()), PlainReader)
    import peft

    adapted = model_of("Llama")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["v_proj"]), adapted)
    assert isinstance(reader_of(adapted), PlainReader)


def test_a_reader_has_the_weights_of_when_it_was_made() -> None:
    model = model_of("Qwen2")
    ids = position = torch.zeros((1, 1), dtype=torch.int64)
    with torch.inference_mode():
        before, after = (_alone(model, ids, position, factor) for factor in (1.0, -1.0))
    assert not torch.allclose(before, after)


def _alone(model: Any, ids: torch.Tensor, position: torch.Tensor, factor: float) -> torch.Tensor:
    model.model.layers[0].mlp.up_proj.weight.mul_(factor)
    slots = Slots(model)
    slots.reserve(1, 1)
    view = SlotView(slots.kv, slice(0, 1), 1, position)
    got = reader_of(model).logits(ids, position, view)
    assert torch.allclose(got, PlainReader(model).logits(ids, position, view), atol=1e-4)
    return got


def test_an_engine_over_another_build_writes_what_transformers_writes() -> None:
    """Two rollouts of a prompt with a prefix, one of a prompt without: prefix, rest and steps."""
    model = model_of("Qwen3")
    prompts = [Prompt((5, 6, 7, 8), 3), Prompt((5, 6, 7, 8), 3), Prompt((9, 10), 0)]
    sampling = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=6)
    engine = TransformersEngine(model, (99,), 0, 8)
    got = engine.generate([Request(prompt, sampling) for prompt in prompts], torch.Generator())
    for prompt, item in zip(prompts, got, strict=True):
        ids = list(prompt.ids)
        with torch.no_grad():
            for _ in range(6):
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert item.ids == tuple(ids[len(prompt.ids) :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prompt_that_shares_nothing_is_read_in_the_models_dtype(dtype: torch.dtype) -> None:
    model = model_of("Llama").to(dtype)
    engine = TransformersEngine(model, (39,), 0, 4)
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=3)
    prompt = Prompt((5, 6, 7), 0)
    [made] = engine.generate([Request(prompt, greedy)], torch.Generator())
    alone = model(torch.tensor([prompt.ids])).logits[0, -1]
    assert made.ids[0] == int(alone.argmax())
