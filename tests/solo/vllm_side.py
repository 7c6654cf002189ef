"""Runs in the vLLM environment: ``python vllm_side.py JOB.json OUT.json`` plays the job's requests through the engine.

The job names a model, two PEFT folders, prompts, stop ids; each adapter is handed over in turn.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from poimen_exp.gates.types import Generation, Prompt, Sampling
from poimen_exp.solo.engine import Request
from poimen_exp.solo.vllm_engine import VllmEngine, VllmSettings


def main(job: Any) -> dict[str, Any]:
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=-1, max_tokens=job["max_tokens"])
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=job["max_tokens"])
    adapters = iter(job["adapters"])

    def save(folder: Path) -> None:
        shutil.copytree(next(adapters), folder)

    settings = VllmSettings(Path(job["model"]), "float32", 16, 8, 128, 0.3, True, 0)
    engine = VllmEngine(settings, [sampling, greedy], job["stop_ids"], save)
    prompts = [Prompt(tuple(ids), 0) for ids in job["prompts"]]
    out: dict[str, Any] = {"turns": []}
    for number in range(len(job["adapters"])):
        if number:
            engine.sync()
        found = engine.generate([Request(prompt, greedy) for prompt in prompts], generator())
        out[f"greedy {number}"] = [plain(item) for item in found]
    out["sampled"] = [plain(item) for item in engine.generate([Request(p, sampling) for p in prompts], generator())]
    out["again"] = [plain(item) for item in engine.generate([Request(p, sampling) for p in prompts], generator())]

    def follow(key: int, generation: Generation) -> Request | None:
        out["turns"].append([key, plain(generation)])
        turns = sum(place == key for place, _ in out["turns"])
        return Request(Prompt((*prompts[key].ids, *generation.ids), 0), greedy) if turns < 2 else None

    engine.serve({key: Request(prompts[key], greedy) for key in (0, 1)}, follow, generator())
    return out


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def plain(item: Generation) -> list[Any]:
    return [list(item.ids), list(item.log_probs), item.clipped]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
