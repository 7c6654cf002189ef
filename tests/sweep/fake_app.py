"""A small Hydra application with the poimen sweeper: its task writes what a run writes, in milliseconds.

Run as a program. What the gate check and the task do is set by environment variables, which no configuration reaches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from poimen_exp.errors import PoimenError, Refused
from poimen_exp.sweep import gate
from poimen_exp.tracking.files import write_json


def check(configs: Sequence[DictConfig]) -> None:
    """The gate check of the real program, replaced in code."""
    say("gate", [config.alpha for config in configs])
    if os.environ.get("FAKE_GATE") == "fail":
        raise Refused("gate check: update reward: got -1, expected 1")


gate.check_before_sweep = check


def task(config: DictConfig) -> float | None:
    """Writes metrics and a result; the value depends on alpha and seed only."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    say("run", [str(folder), repr(config.alpha), repr(config.seed), repr(config.name)])
    act(config)
    value = round(config.alpha + config.seed / 100, 4)
    line = {"step": 1, "time_s": 0.1, "metrics": {"val/reward/total": value}, "counts": {"val/reward/total": 4}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    result = {"status": "completed", "objective": {"name": "val/reward/total", "value": value}}
    write_json(folder / "result.json", result | {"step": 1, "best_step": 1, "adapter": None})
    if os.environ.get("FAKE_HANG_AFTER_RESULT") == repr(config.alpha):
        time.sleep(60)
    return value


def act(config: DictConfig) -> None:
    """Waits for other sweeps, or fails, hangs or dies at the alpha that the environment names."""
    deadline = time.monotonic() + 120
    while sweeps_at_work() < int(os.environ.get("FAKE_SWEEPS", "0")) and time.monotonic() < deadline:
        time.sleep(0.02)
    if os.environ.get("FAKE_HANG") == repr(config.alpha):
        time.sleep(60)
    if os.environ.get("FAKE_RAISE") == repr(config.alpha):
        raise ValueError("the corpus burned down")
    if os.environ.get("FAKE_EXIT") == repr(config.alpha):
        sys.exit(3)
    if os.environ.get("FAKE_DIE") == repr(config.alpha):
        os.kill(os.getpid(), 9)


def sweeps_at_work() -> int:
    """Sweeps with a run in the log."""
    lines = [json.loads(line) for line in Path(os.environ["FAKE_LOG"]).read_text().splitlines()]
    return len({Path(line[1]).parent for line in lines if line[0] == "run"})


def returned(config: DictConfig) -> float | None:
    """The value, or what the environment says that the run returns instead."""
    value = task(config)
    odd = os.environ.get("FAKE_RETURN", "").partition("@")
    if odd[2] != repr(config.alpha):
        return value
    (Path(HydraConfig.get().runtime.output_dir) / "result.json").unlink()
    return None if odd[0] == "none" else float(odd[0])


def say(kind: str, what: list[object]) -> None:
    """Appends a line to the log that tests read: one write, so that two processes do not mix."""
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps([kind, *what]) + "\n")


@hydra.main(version_base="1.3", config_path=str(Path(__file__).parent / "fake_conf"), config_name="config")
def main(config: DictConfig) -> float | None:
    return returned(config)


def program() -> None:
    """Errors of ours end with their exit code, as in the real program."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
    except PoimenError as error:
        print(f"refused: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    program()
