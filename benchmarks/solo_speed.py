"""Speed of one device's GRPO step: rollout and update tokens a second, seconds a step, peak memory.

    python benchmarks/solo_speed.py MODEL [--prompts 16] [--rollouts 8] [--prompt 256] [--response 256]
        [--engine transformers|vllm] [--share 0.4] [--steps 3] [--micro 32768] [--rank 16] [--dtype bfloat16]
        [--no-rollout]

Prompts are random ids, another prompt each; no id ends a response, so that every response has its full length. Rewards
are random. The first step is not counted: it loads and records. Update tokens count each row's prompt, as verl does,
also where the rollouts of a prompt shared its forward; the share of the card's matrix rate is 4 x parameters x tokens
(LoRA needs no weight gradients of the base) over the update's seconds and the rate measured in the same process, with
prompts counted a row and, beside it, once a group, as they are computed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from poimen_exp.gates.check_step import plain_loss
from poimen_exp.gates.metrics import Means
from poimen_exp.gates.types import Generation, Prompt, Sampling
from poimen_exp.solo.engine import Request, TransformersEngine
from poimen_exp.solo.policy import Policy, pick_device
from poimen_exp.solo.ragged import spread
from poimen_exp.solo.rows import Row
from poimen_exp.solo.settings import ModelSettings, OptimSettings, StepSettings
from poimen_exp.solo.task import RolloutBatch
from poimen_exp.solo.update import Updater


def main() -> None:
    options = _options()
    device = pick_device("auto")
    policy = Policy(_model(options), device)
    updater = _updater(policy, options)
    engine: Any = None if options.no_rollout else _engine(policy, options)
    generator = torch.Generator(device=device).manual_seed(0)
    timings: list[dict[str, float]] = []
    for step in range(options.steps + 1):
        timings.append(_step(policy, updater, engine, options, generator, step))
        print(json.dumps({"step": step, **timings[-1]}), flush=True)
    print(json.dumps(_summary(policy, options, timings[1:], device), indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name, default in (("prompts", 16), ("rollouts", 8), ("prompt", 256), ("response", 256), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro", type=int, default=32768, help="padded tokens of a forward of the update")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--share", type=float, default=0.4, help="of the GPU's memory, for vLLM")
    parser.add_argument("--no-rollout", action="store_true", help="random responses: the update alone")
    return parser.parse_args()


def _model(options: argparse.Namespace) -> ModelSettings:
    return ModelSettings(
        path=options.model,
        lora_rank=options.rank,
        lora_alpha=2 * options.rank,
        target_modules="all-linear",
        dtype=options.dtype,
        attn_implementation="sdpa",
        adapter=None,
    )


def _updater(policy: Policy, options: argparse.Namespace) -> Updater:
    optim = OptimSettings(
        lr=1e-5,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        lr_warmup_steps=0,
        lr_scheduler_type="constant",
        min_lr_ratio=0.0,
        grad_clip=1.0,
        total_training_steps=100,
    )
    step = StepSettings(
        train_batch_size=options.prompts,
        ppo_mini_batch_size=options.prompts,
        ppo_epochs=1,
        micro_batch_tokens=options.micro,
        shuffle=False,
    )
    return Updater(policy, policy.state(), 0, 1.0, plain_loss(), optim, step)


def _engine(policy: Policy, options: argparse.Namespace) -> Any:
    rows = options.prompts * options.rollouts
    if options.engine == "transformers":
        return TransformersEngine(policy.sampler, (), 0, rows)
    from poimen_exp.adapters.lora_config import vllm_rank
    from poimen_exp.solo.vllm_engine import VllmEngine, VllmSettings

    length = options.prompt + options.response
    settings = VllmSettings(
        options.model, options.dtype, vllm_rank(options.rank), rows, length, options.share, enforce_eager=False, seed=0
    )
    return VllmEngine(settings, [_sampling(options)], (), policy.model.save_pretrained)


def _sampling(options: argparse.Namespace) -> Sampling:
    return Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=options.response)


def _step(
    policy: Policy, updater: Updater, engine: Any, options: argparse.Namespace, generator: torch.Generator, step: int
) -> dict[str, float]:
    prompts = _prompts(policy, options, step)
    begun = time.perf_counter()
    responses = _responses(engine, prompts, options, generator)
    _wait()
    rolled = time.perf_counter()
    if options.engine == "vllm" and engine is not None:
        engine.sleep()
    slept = time.perf_counter()
    report = updater.update(_batch(prompts, responses, options, step))
    _wait()
    updated = time.perf_counter()
    policy.sync()
    if options.engine == "vllm" and engine is not None:
        engine.wake()
        engine.sync()
    _wait()
    ended = time.perf_counter()
    assert not report.skipped, report.skipped
    return {
        "rollout_s": rolled - begun,
        "update_s": updated - slept,
        "sync_s": ended - updated + slept - rolled,
        "step_s": ended - begun,
        "probs_diff_mean": report.metrics["training/rollout_probs_diff_mean"],
    }


def _prompts(policy: Policy, options: argparse.Namespace, step: int) -> list[Prompt]:
    source = torch.Generator().manual_seed(step)
    most = policy.model.config.vocab_size
    ids = torch.randint(10, most, (options.prompts, options.prompt), generator=source).tolist()
    return [Prompt(tuple(row), options.prompt - 1) for row in ids for _ in range(options.rollouts)]


def _responses(
    engine: Any, prompts: list[Prompt], options: argparse.Namespace, generator: torch.Generator
) -> list[Generation]:
    if engine is not None:
        found: list[Generation] = engine.generate([Request(p, _sampling(options)) for p in prompts], generator)
        assert all(len(item.ids) == options.response for item in found)
        return found
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 100, (len(prompts), options.response), generator=source).tolist()
    return [Generation(tuple(row), (0.0,) * len(row), True) for row in ids]


def _batch(prompts: list[Prompt], responses: list[Generation], options: argparse.Namespace, step: int) -> RolloutBatch:
    rows = tuple(Row(p, r.ids, r.log_probs) for p, r in zip(prompts, responses, strict=True))
    weights = torch.randn(len(rows), generator=torch.Generator().manual_seed(step))
    return RolloutBatch(
        rows=rows,
        names=tuple(map(str, range(len(rows)))),
        advantages=spread(weights, rows),
        group=torch.arange(options.prompts).repeat_interleave(options.rollouts),
        metrics=Means(),
        watch=Means(),
        attempted=len(rows),
        failed=0,
        records=(),
    )


def _summary(
    policy: Policy, options: argparse.Namespace, timings: list[dict[str, float]], device: torch.device
) -> dict[str, Any]:
    mean = {name: sum(item[name] for item in timings) / len(timings) for name in timings[0]}
    rows = options.prompts * options.rollouts
    by_row = rows * (options.prompt + options.response)
    computed = options.prompts * options.prompt + rows * options.response
    parameters = sum(value.numel() for value in policy.sampler.parameters())
    rate = _matrix_rate(device, getattr(torch, options.dtype))
    flops = 4 * parameters / mean["update_s"]
    return {
        "model": options.model.name,
        "engine": None if options.no_rollout else options.engine,
        "shape": f"{options.prompts} x {options.rollouts}, prompt {options.prompt}, response {options.response}",
        "parameters": parameters,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "steps": len(timings),
        **{name: round(value, 4) for name, value in mean.items()},
        "rollout_tokens_per_s": round(rows * options.response / mean["rollout_s"]),
        "update_tokens_per_s": round(by_row / mean["update_s"]),
        "matrix_tflops": round(rate / 1e12, 1),
        "update_share_of_matrix_rate": round(flops * by_row / rate, 3),
        "update_share_computed_once_a_group": round(flops * computed / rate, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
    }


def _matrix_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """FLOP/s of one square product of that type, the best of ten."""
    size = size if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        _wait()
        begun = time.perf_counter()
        a @ b
        _wait()
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
