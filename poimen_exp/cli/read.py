"""``poimen read``: the gated reader, as a user of an adapter runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poimen_exp.cli.adapter import DEFAULT_REGISTRY, RegistryOption

if TYPE_CHECKING:
    from poimen_exp.gates.types import Trajectory


def read(
    doc: Annotated[Path, typer.Argument(help="Text file, or a corpus file (.jsonl) with --document.")],
    question: Annotated[str, typer.Option("--question", "-q", help="What to find out.")],
    adapter: Annotated[str, typer.Option("--adapter", metavar="NAME|DIR", help="Of the registry, or a folder.")],
    model: Annotated[Path | None, typer.Option("--model", help="Base model folder. [default: the manifest's]")] = None,
    url: Annotated[str | None, typer.Option("--url", help="Server that has the adapter; else in process.")] = None,
    document: Annotated[str | None, typer.Option(help="Id of the document in a corpus file.")] = None,
    registry: RegistryOption = DEFAULT_REGISTRY,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    without_adapter: Annotated[
        bool, typer.Option("--without-adapter", help="Read with the base model alone, for comparison.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read DOC chunk by chunk with an adapter's gates, and answer QUESTION from the memory."""
    from poimen_exp.adapters.read import Source, load_units, open_reader, read_document
    from poimen_exp.gates.types import Sampling

    units = load_units(doc, document)
    source = Source(adapter, registry, model, url, use_adapter=not without_adapter)
    reader = open_reader(source, Sampling(temperature, top_p, top_k=-1, max_tokens=1), seed)
    trajectory = read_document(reader, units, question, lambda text: print(text, file=sys.stderr))
    if as_json:
        print(json.dumps(as_values(trajectory), ensure_ascii=False))
    else:
        show(trajectory)


def as_values(trajectory: Trajectory) -> dict[str, Any]:
    """The reading as plain values."""
    turns = [
        {
            "chunk": turn.chunk,
            "text": trajectory.task.chunks[turn.chunk],
            "response": turn.text,
            "update": None if turn.gate is None else turn.gate.update,
            "end": None if turn.gate is None else turn.gate.end,
            "memory": turn.memory,
        }
        for turn in trajectory.turns
        if turn.chunk is not None
    ]
    return {
        "question": trajectory.task.question,
        "chunks": len(trajectory.task.chunks),
        "exit_index": trajectory.exit_index,
        "turns": turns,
        "answer": trajectory.answer,
        "answer_response": trajectory.turns[-1].text,
    }


def show(trajectory: Trajectory) -> None:
    """Prints chunks, gates, memory, early exit and answer."""
    from rich.console import Console
    from rich.text import Text

    console, chunks = Console(highlight=False), trajectory.task.chunks
    for turn in trajectory.chunk_turns:
        assert turn.chunk is not None
        console.rule(f"chunk {turn.chunk + 1} of {len(chunks)}")
        console.print(Text(chunks[turn.chunk]))
        if turn.gate is None:
            console.print(Text(f"malformed turn, memory kept: {turn.text}", style="red"))
        else:
            console.print(Text(f"think: {turn.gate.think}", style="dim"))
            gates = f"update: {'yes' if turn.gate.update else 'no'} · exit: {'end' if turn.gate.end else 'continue'}"
            console.print(Text(gates, style="bold"))
        console.print(Text(f"memory ({turn.memory_tokens} tokens): {turn.memory}", style="green"))
    console.rule("answer")
    read_chunks, unread = trajectory.exit_index + 1, len(chunks) - trajectory.exit_index - 1
    ended = trajectory.chunk_turns[-1].gate is not None and trajectory.chunk_turns[-1].gate.end
    how = f"stopped early, {unread} unread" if unread else ("stopped at the last one" if ended else "never stopped")
    console.print(Text(f"read {read_chunks} of {len(chunks)} chunks ({how})"))
    answer = trajectory.answer
    console.print(Text(f"no \\boxed{{}} in: {trajectory.turns[-1].text}" if answer is None else answer, style="bold"))
