"""Reads a document with an adapter, in process or against a server: the reading loop of training, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from poimen_exp.adapters.check import mount_check
from poimen_exp.adapters.client import Client
from poimen_exp.adapters.manifest import Dtype, Manifest, read_manifest
from poimen_exp.adapters.publish import base_folder, resolve_adapter
from poimen_exp.adapters.registry import Registry
from poimen_exp.corpus.chunking import ChunkingError, UnitCounts, chunk_text, plan_chunks
from poimen_exp.corpus.rows import DocumentRow, RowError, Unit, decode_row
from poimen_exp.errors import Refused
from poimen_exp.gates.codec import HfCodec, TextCodec
from poimen_exp.gates.protocol import PROTOCOL_VERSION, GateProtocol
from poimen_exp.gates.reading import read
from poimen_exp.gates.types import ExitTarget, Generate, Generation, Prompt, ReadingTask, Sampling, Trajectory


@dataclass(frozen=True)
class Reader:
    """Everything that one reading needs beside the document and the question."""

    protocol: GateProtocol
    chunk_tokens: int
    sampling: Sampling
    generate: Generate


@dataclass(frozen=True)
class Source:
    """Where a reader comes from.

    Attributes:
        adapter: ``name[@version]`` of the registry, or a run or adapter folder.
        base: folder of the base model; None where the manifest says it was.
        url: server that serves the adapter under its name; None reads in this process.
        use_adapter: False reads with the base model alone, on the adapter's protocol.
    """

    adapter: str
    registry: str
    base: Path | None
    url: str | None
    use_adapter: bool = True


def open_reader(source: Source, sampling: Sampling, seed: int) -> Reader:
    """The reader that the adapter's manifest describes; ``max_tokens`` is the manifest's.

    Raises:
        Refused: no such adapter, base model or protocol; an adapter that cannot be mounted.
        RunFailed: the server does not answer or does not serve the adapter.
    """
    from poimen_exp.solo.policy import load_codec

    folder, name = resolve_adapter(source.adapter, Registry(source.registry))
    manifest, base = read_manifest(folder), base_folder(folder, source.base)
    codec = load_codec(base)
    protocol = adapter_protocol(manifest, codec, f"adapter {folder}")
    sampling = replace(sampling, max_tokens=manifest.response_tokens)
    if source.url is not None:
        client = Client(source.url)
        served = served_name(client, name, use_adapter=source.use_adapter)
        generate = server_generate(client, served, codec.stop_ids, seed)
    else:
        mount_check(folder, base)
        mounted = folder if source.use_adapter else None
        generate = local_generate(base, mounted, manifest.dtype, codec, seed)
    return Reader(protocol, manifest.chunk_tokens, sampling, generate)


def served_name(client: Client, name: str, *, use_adapter: bool) -> str:
    """The model to ask for: the adapter, or its base model."""
    adapter = client.served_adapter(name)
    return adapter.name if use_adapter else str(adapter.parent)


def read_document(reader: Reader, units: list[Unit], question: str, say: Callable[[str], None]) -> Trajectory:
    """Chunks ``units`` as training does, reads them, and answers.

    Args:
        say: is told of every turn before it is taken.

    Raises:
        Refused: nothing to read, or a header leaves no room in a chunk.
    """
    chunks = chunk_document(units, reader.chunk_tokens, reader.protocol.codec)
    unlabelled = (None,) * len(chunks)
    task = ReadingTask("read", "", question, None, chunks, unlabelled, ExitTarget(known=False))
    generate = _announced(reader.generate, len(chunks), say)
    return asyncio.run(_run(task, reader, generate))


async def _run(task: ReadingTask, reader: Reader, generate: Generate) -> Trajectory:
    return await read(task, reader.protocol, generate, reader.sampling)


def chunk_document(units: list[Unit], chunk_tokens: int, codec: TextCodec) -> tuple[str, ...]:
    """Texts of the chunks that the corpus loader would make of the same units."""
    try:
        plan = plan_chunks(units, chunk_tokens, UnitCounts(codec))
    except ChunkingError as error:
        raise Refused(f"document: {error}") from error
    if not plan.chunks:
        raise Refused("document: holds nothing but white space; expected text to read")
    return tuple(chunk_text(units, pieces) for pieces in plan.chunks)


def load_units(path: Path, document: str | None) -> list[Unit]:
    """A text file as one unit a line; of a corpus file (``.jsonl``) the units of the named document.

    Raises:
        Refused: no such file or document, or a file that is not UTF-8.
    """
    if not path.is_file():
        raise Refused(f"{path}: no such file; expected a text file, or a corpus file with --document ID")
    if path.suffix == ".jsonl":
        return _corpus_units(path, document)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{path}: not UTF-8 text (byte {error.start})") from error
    # Only line feeds end a line, as in a corpus: U+2028 and U+0085 are text.
    return [Unit(f"line {number}", line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1)]


def _corpus_units(path: Path, document: str | None) -> list[Unit]:
    known: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = decode_row(line.strip()) if line.strip() else None
            except RowError as error:
                raise Refused(f"{path}:{number}: {error}") from error
            if isinstance(row, DocumentRow):
                if row.document_id == document:
                    return list(row.units)
                known.append(row.document_id)
    raise Refused(f"{path}: no document {document!r}; name one with --document: {', '.join(known[:10]) or 'none'}")


def adapter_protocol(manifest: Manifest, codec: TextCodec, where: str) -> GateProtocol:
    """The protocol that the adapter was trained on.

    Raises:
        Refused: the adapter's protocol version is not the one of this program.
    """
    if manifest.protocol != PROTOCOL_VERSION:
        raise Refused(
            f"{where}: trained on {manifest.protocol}, this program speaks {PROTOCOL_VERSION}; prompts would differ"
        )
    assert manifest.layout is not None
    assert manifest.wording is not None
    return GateProtocol(codec, manifest.layout, manifest.wording, manifest.memory_tokens)


def server_generate(client: Client, model: str, stop_ids: tuple[int, ...], seed: int) -> Generate:
    """``generate`` of the served ``model``.

    Log-probs are those of temperature 1, also where the sampling's is another: a server gives no others.
    """

    async def generate(prompt: Prompt, sampling: Sampling) -> Generation:
        answer = await asyncio.to_thread(client.complete, model, prompt.ids, sampling, stop_ids, seed)
        return Generation(answer.ids, answer.log_probs, clipped=not answer.finished)

    return generate


def local_generate(base_model_dir: Path, adapter: Path | None, dtype: Dtype, codec: HfCodec, seed: int) -> Generate:
    """``generate`` of training's engine, in this process; ``adapter`` None is the base model alone."""
    import torch

    from poimen_exp.adapters.probe import load_base
    from poimen_exp.solo.engine import Request, TransformersEngine
    from poimen_exp.solo.policy import pick_device

    device = pick_device("auto")
    model = load_base(base_model_dir, dtype)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    engine = TransformersEngine(model.to(device), codec.stop_ids, codec.pad_id, max_rows=1)
    generator = torch.Generator(device).manual_seed(seed)

    async def generate(prompt: Prompt, sampling: Sampling) -> Generation:
        return engine.generate([Request(prompt, sampling)], generator)[0]

    return generate


def _announced(generate: Generate, chunks: int, say: Callable[[str], None]) -> Generate:
    asked = 0

    async def saying(prompt: Prompt, sampling: Sampling) -> Generation:
        nonlocal asked
        asked += 1
        say(f"turn {asked}; at most {chunks} chunks and the answer")
        return await generate(prompt, sampling)

    return saying
