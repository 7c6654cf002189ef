"""Corpora ``poimen.corpus/1``: JSONL to reading tasks, the kappa contract, the split by project, audits, converters."""

from poimen_exp.corpus.chunking import tokenizer_sha256
from poimen_exp.corpus.loader import Corpus, TaskSet, open_corpus
from poimen_exp.corpus.manifest import Manifest, load_manifest
from poimen_exp.corpus.split import ProjectSplit, split_projects
from poimen_exp.corpus.writer import write_corpus

__all__ = [
    "Corpus",
    "Manifest",
    "ProjectSplit",
    "TaskSet",
    "load_manifest",
    "open_corpus",
    "split_projects",
    "tokenizer_sha256",
    "write_corpus",
]
