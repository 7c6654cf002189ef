"""A GGUF file of SmolLM2's shape, 30 kB: a byte alphabet, three special tokens, three merges, two layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 32, 48, 2, 2, 1


def tokens() -> list[str]:
    from tokenizers import pre_tokenizers

    # "20" and "24" must never be used: SmolLM2 splits digits before it merges.
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "20", "24"]


def write_gguf(path: Path, pre: str = "smollm", eos: int = 2) -> Path:
    from gguf import GGUFWriter

    names = tokens()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(names))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(names) - len(SPECIAL)))
    writer.add_token_merges(["t h", "2 0", "2 4"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)
    rng = np.random.default_rng(0)
    for name, shape in _shapes(len(names)).items():
        writer.add_tensor(name, rng.normal(0.0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    key = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        parts = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (key, HIDDEN),
            "attn_v": (key, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
