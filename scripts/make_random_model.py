"""Makes a model folder of a known shape with random weights, for benchmarks: ``make_random_model.py SHAPE OUT``.

SHAPE: qwen2.5-0.5b, -1.5b, -3b or -7b (sizes from the published configurations). The tokenizer is the
quickstart's: ids are what a benchmark draws.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SHAPES = {  # hidden, layers, heads, key-value heads, intermediate, tied embeddings
    "qwen2.5-0.5b": (896, 24, 14, 2, 4864, True),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 8960, True),
    "qwen2.5-3b": (2048, 36, 16, 2, 11008, True),
    "qwen2.5-7b": (3584, 28, 28, 4, 18944, False),
}


def main(shape: str, out: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, layers, heads, kv_heads, intermediate, tied = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=152_064 if shape.endswith("7b") else 151_936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(out)
    assets = Path(__file__).resolve().parents[1] / "poimen_exp" / "assets" / "quickstart" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (assets / name).is_file():
            shutil.copy(assets / name, out / name)
    print(f"{shape}: {model.num_parameters():,} parameters in {out}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
