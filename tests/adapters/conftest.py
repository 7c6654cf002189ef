"""A tiny Qwen2 that vLLM serves on a CPU (head size 32), and an adapter that was really trained on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from poimen_exp.adapters.export import export_adapter
from poimen_exp.adapters.manifest import AdapterInfo

CHAT = (
    "{% for m in messages %}{{'<|im_start|>'+m['role']+'\n'+m['content']+'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
TEXT = "Mira merged the release branch and deployed it at noon. <think>seen</think><check>yes</check>\n"


def make_tiny_model(folder: Path, seed: int = 0) -> Path:
    """95k parameters: 2 layers, hidden 64, 2 heads of 32; a byte-level tokenizer of 300 entries."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXT] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=special[2], pad_token=special[0], model_max_length=2048
    )
    tokenizer.chat_template = CHAT
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_peft(base: Path, rank: int = 8, **changes: object):
    """A fresh LoRA (B zero) over the attention and MLP projections."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    values = {"target_modules": ["q_proj", "v_proj", "down_proj"], **changes}
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, **values)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


def train(model, base: Path, steps: int = 5) -> None:
    """A few optimizer steps on one sentence: enough for B to leave zero."""
    import torch
    from transformers import AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(base).encode(TEXT)])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def make_info(base: Path, **changes: object) -> AdapterInfo:
    info = AdapterInfo(
        base_model=base,
        dtype="float32",
        layout="chunk_first",
        wording="terse",
        memory_tokens=32,
        chunk_tokens=40,
        response_tokens=64,
        corpus_id="logs",
        corpus_sha256="0" * 64,
        label_status="constructed",
        run_id="run-1",
        step=5,
        metrics={"val/reward/total": 1.25},
    )
    return replace(info, **changes)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen2")


@pytest.fixture(scope="session")
def trained(base: Path):
    """The PEFT model after training; tests must not change it."""
    model = make_peft(base)
    train(model, base)
    return model.eval()


@pytest.fixture
def adapter(trained, base: Path, tmp_path: Path) -> Path:
    """The trained adapter, exported to a folder of the test's own."""
    return export_adapter(trained, tmp_path / "adapter", make_info(base))
