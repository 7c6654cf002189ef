"""Makes the tiny model that ships: ``python scripts/make_tiny_model.py --out DIR [--steps N] [--seed S]``.

Needs torch, transformers and tokenizers. A GPU is used if there is one (50 to 110 steps a second on one H200 with
``--workers 14``), else the CPU (hours). The network before its gates are made coins is kept in ``DIR-before-coins``;
from there the rest takes eight minutes of one CPU core: ``--before-coins DIR-before-coins``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.quickstart.coins import make_coins
from poimen_exp.quickstart.evaluate import first_mistakes, measure, oracle, sample_readings
from poimen_exp.quickstart.logs import Shape, sample_tasks
from poimen_exp.quickstart.model import MEMORY_TOKENS, Recipe, Size, build_network, build_tokenizer, train


def main() -> None:
    options = _options()
    torch.manual_seed(options.seed)
    size = Size(options.hidden, options.layers, options.heads, options.kv_heads, options.intermediate)
    recipe = Recipe(options.steps, options.batch, options.lr, seed=options.seed, workers=options.workers)
    tokenizer = build_tokenizer()
    codec = HfCodec(tokenizer)
    protocol = GateProtocol(codec, "chunk_first", "terse", MEMORY_TOKENS)
    if options.before_coins:
        network = Qwen2ForCausalLM.from_pretrained(options.before_coins)
    else:
        network = build_network(tokenizer, size, recipe.seed)
    print(f"{network.num_parameters()} parameters, {len(tokenizer)} tokens", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()

    def report(step: int, loss: float) -> None:
        print(f"step {step} loss {loss:.4f} {time.monotonic() - started:.1f} s", flush=True)
        if options.eval_every and step % options.eval_every == 0 and step < recipe.steps:
            print(_skill(network, protocol, codec.pad_id, 256), flush=True)
            _save(network, tokenizer, options.out)

    if not options.before_coins:
        train(network, protocol, recipe, device, report, options.report_every)
        _save(network, tokenizer, options.out.with_name(f"{options.out.name}-before-coins"))
    make_coins(network, protocol, recipe, device, lambda name, step, loss: print(f"{name} {step} loss {loss:.4f}"))
    _save(network, tokenizer, options.out)
    print(_skill(network, protocol, codec.pad_id, options.readings))


def _options() -> argparse.Namespace:
    recipe, size = Recipe(), Size()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model and its tokenizer")
    for name in ("steps", "batch", "seed", "workers"):
        parser.add_argument(f"--{name}", type=int, default=getattr(recipe, name))
    parser.add_argument("--lr", type=float, default=recipe.lr)
    for name in ("hidden", "layers", "heads", "kv_heads", "intermediate"):
        parser.add_argument(f"--{name}", type=int, default=getattr(size, name))
    parser.add_argument("--before-coins", type=Path, help="a trained network: only its gates are made")
    parser.add_argument("--readings", type=int, default=2000, help="readings of the evaluation at the end")
    parser.add_argument("--report-every", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=0, help="also evaluate and save every so many steps")
    options = parser.parse_args()
    kept = ("out", "before_coins", "seed", "workers", "readings")  # the others are of the main training
    idle = [name for name, value in vars(options).items() if name not in kept and value != parser.get_default(name)]
    if options.before_coins and idle:
        parser.error(f"--before-coins: the network is trained; without effect: {', '.join(idle)}")
    return options


def _skill(network: Any, protocol: GateProtocol, pad_id: int, readings: int) -> str:
    """Skill on logs the training never saw, with the model's own gates and with those of the labels."""
    network.eval()
    tasks = list(islice(sample_tasks(Shape(), random.Random("held out")), readings))
    own = sample_readings(network, protocol, tasks, pad_id, seed=0)
    labels = sample_readings(network, protocol, tasks, pad_id, seed=0, override=oracle)
    network.train()
    mistakes = "\n".join(first_mistakes(own, protocol, 2))
    right = measure(labels, protocol)
    return (
        f"{measure(own, protocol).lines()}\noutcome of oracle gates {right.outcome:.4f}, "
        f"exact exits {right.exact_exit:.4f}, candidates {right.candidate:.4f}\nmistakes:\n{mistakes}"
    )


def _save(network: Any, tokenizer: Any, folder: Path) -> None:
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    main()
