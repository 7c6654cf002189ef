"""Small Parquet files in verl's layout, to try a run of prompts with: rows follow from the seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

from poimen_exp.errors import Refused
from poimen_exp.solo.parquet import write_rows

Profile = Literal["exact-answer", "target-length"]

_COLOURS = ("red", "blue", "green", "white", "black", "yellow")
_THINGS = ("lamp", "door", "boat", "river", "garden", "window", "coin", "letter")


def write_sample(path: Path, profile: Profile, rows: int, seed: int, force: bool = False) -> None:
    """Writes ``rows`` prompts that the reward of ``profile`` can score.

    Raises:
        Refused: another ending than ``.parquet``; a file lies there and ``force`` is off.
    """
    if path.suffix != ".parquet":
        raise Refused(f"--out: got {path}, expected a name that ends in .parquet")
    if path.exists() and not force:
        raise Refused(f"--out: {path} is there already; expected another name, or --force")
    write_rows(path, sample_rows(profile, rows, seed))


def sample_rows(profile: Profile, rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows with verl's columns: ``prompt``, ``data_source``, ``ability``, ``reward_model``, ``extra_info``."""
    rng = random.Random(f"{profile}/{seed}")
    make = _sum if profile == "exact-answer" else _length
    return [_row(profile, place, *make(rng)) for place in range(rows)]


def _sum(rng: random.Random) -> tuple[str, str, int | None]:
    first, second = rng.randint(0, 9), rng.randint(0, 9)
    return f"What is {first} + {second}? Answer with the number.", str(first + second), None


def _length(rng: random.Random) -> tuple[str, str, int | None]:
    target = rng.choice((4, 8, 12, 16))
    return f"Write {target} words about the {rng.choice(_COLOURS)} {rng.choice(_THINGS)}.", "", target


def _row(profile: Profile, place: int, question: str, answer: str, target: int | None) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "data_source": f"poimen/{profile}",
        "ability": "arithmetic" if profile == "exact-answer" else "writing",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": place, "target_length": target},
    }
