"""A byte tokenizer, small corpora and settings for the corpus tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from poimen_exp.corpus import Corpus, open_corpus, write_corpus
from poimen_exp.solo.settings import CorpusSettings


class ByteCodec:
    """One id a UTF-8 byte: token counts can be worked out by hand."""

    stop_ids = (0,)

    def encode_template(self, text: str) -> tuple[int, ...]:
        return self.encode_plain(text)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def plain_offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        return tuple((i, i + 1) for i, char in enumerate(text) for _ in char.encode())

    def count_plain(self, text: str) -> int:
        return len(self.plain_offsets(text))

    def decode(self, ids: tuple[int, ...]) -> str:
        return bytes(ids).decode(errors="replace")

    def render(self, user: str) -> str:
        return user


SETTINGS = CorpusSettings(
    path=Path("unset"),
    chunk_tokens=40,
    max_chunks=100,
    min_kappa=0.6,
    allow_unmeasured=False,
    on_too_long="refuse",
    split_seed=0,
    val_fraction=0.1,
    test_fraction=0.1,
    max_val_tasks=None,
)


def prompt_tokens(question: str, chunk: str) -> int:
    """10 tokens of template, 20 of memory."""
    return 30 + len(question.encode()) + len(chunk.encode())


def open_at(folder: Path, max_prompt_length: int = 1000, **changes: Any) -> Corpus:
    return open_corpus(replace(SETTINGS, path=folder, **changes), ByteCodec(), prompt_tokens, max_prompt_length)


def document(name: str, project: str, texts: Iterable[str], header: str | None = None) -> dict[str, Any]:
    units: list[dict[str, Any]] = [{"unit_id": f"u{i}", "text": text} for i, text in enumerate(texts)]
    if header is not None:
        units = [unit | {"header": header} for unit in units]
    return {"type": "document", "document_id": name, "project": project, "units": units}


def question(name: str, document_id: str, spans: Any = (), **more: Any) -> dict[str, Any]:
    evidence = None if spans is None else [{"unit_id": u, "start": s, "end": e} for u, s, e in spans]
    return {
        "type": "trajectory", "trajectory_id": name, "document_id": document_id, "question": "Who?",
        "answers": ["Ann"], "evidence": evidence,
    } | more  # fmt: skip


def labelled(name: str, project: str, labels: Iterable[bool | None], **more: Any) -> dict[str, Any]:
    chunks = [{"text": f"{name} chunk {i}", "evidence": label} for i, label in enumerate(labels)]
    return {
        "type": "trajectory", "trajectory_id": name, "project": project, "question": "Who?", "answers": None,
        "chunks": chunks,
    } | more  # fmt: skip


def write(folder: Path, records: Iterable[Mapping[str, Any]], **more: Any) -> Path:
    write_corpus(folder, records, corpus_id="test", **more)
    return folder


def write_raw(folder: Path, data: bytes, records: int, name: str = "corpus.jsonl") -> Path:
    """A corpus folder around bytes that a writer of ours would not write."""
    import hashlib

    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    manifest = {
        "schema": "poimen.manifest/1", "corpus_id": "raw",
        "files": [{"path": name, "sha256": hashlib.sha256(data).hexdigest(), "records": records}],
        "labels": {"update": {"origin": "constructed"}, "exit": {"origin": "constructed"}},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def three_projects() -> list[dict[str, Any]]:
    """One labelled task in each of three projects: one a side."""
    return [labelled(f"t{p}", f"p{p}", [False, True, False]) for p in range(3)]
