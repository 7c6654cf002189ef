"""``poimen data ...``"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


class RewardProfile(StrEnum):
    """Which reward the rows are for."""

    exact_answer = "exact-answer"
    target_length = "target-length"


@app.callback()
def data() -> None:
    """Make Parquet files of single-turn prompts."""


@app.command()
def sample(
    reward_profile: Annotated[RewardProfile, typer.Option(help="Reward that the rows are for.")],
    out: Annotated[Path, typer.Option(help="Parquet file to write.")],
    rows: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 64,
    seed: Annotated[int, typer.Option(help="The same seed gives the same rows.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Small prompts in verl's layout, for a first run: data.train_files=OUT rewards.provider=..."""
    from poimen_exp.solo.sample_data import write_sample

    write_sample(out, reward_profile.value, rows, seed, force)
    provider = reward_profile.value.replace("-", "_")
    typer.echo(f"{out}: {rows} prompts; train on them with data.train_files={out} rewards.provider={provider}")
