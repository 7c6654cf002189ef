"""The generated logs as a ``poimen.corpus/1`` folder."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poimen_exp.corpus.writer import write_corpus
from poimen_exp.quickstart.logs import LogDocument, Shape, make_document
from poimen_exp.quickstart.words import SERVICES

CORPUS_ID = "poimen-project-logs"
SEED, PROJECTS, DOCUMENTS = 7, 15, 3
"""Of the corpus that ships: 15 projects with 3 services of their own, 3 logs each, 8 questions a log."""


def make_corpus(folder: Path, seed: int = SEED, overwrite: bool = False) -> Path:
    """Writes the corpus of ``seed``, labels true by construction; gives the manifest's path."""
    return write_corpus(
        folder,
        corpus_records(seed),
        corpus_id=CORPUS_ID,
        licenses=["Apache-2.0"],
        overwrite=overwrite,
        extra={"seed": seed},
    )


def corpus_records(seed: int, projects: int = PROJECTS, documents: int = DOCUMENTS) -> Iterator[dict[str, Any]]:
    """Documents and questions of all projects. No service belongs to two projects."""
    rng, shape = random.Random(seed), Shape()
    services = list(SERVICES)
    rng.shuffle(services)
    for project in range(projects):
        own = services[project * shape.services : (project + 1) * shape.services]
        for number in range(documents):
            name = f"p{project:02d}-log{number}"
            yield from _records(make_document(own, shape, rng), name, f"project-{project:02d}")


def _records(document: LogDocument, name: str, project: str) -> Iterator[dict[str, Any]]:
    units = [{"unit_id": f"u{i:02d}", "text": entry.text} for i, entry in enumerate(document.entries)]
    yield {"type": "document", "document_id": name, "project": project, "units": units}
    for number, question in enumerate(document.questions):
        yield {
            "type": "trajectory",
            "trajectory_id": f"{name}-q{number}",
            "document_id": name,
            "question": question.text,
            "answers": [question.answer],
            "evidence": [
                {"unit_id": f"u{i:02d}", "start": 0, "end": len(document.entries[i].text)} for i in question.evidence
            ],
        }
