"""MuSiQue: evidence is the supporting paragraphs, whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poimen_exp.corpus.convert import Conversion, TokenCount, wanted, words_x_1_3
from poimen_exp.corpus.convert.hotpotqa import rows
from poimen_exp.corpus.convert.pools import Paragraph, PoolQuestion, pooled_records

LICENSES = ("MuSiQue: CC BY 4.0", "Wikipedia text: CC BY-SA 4.0")


def convert(
    path: Path, tokens: float = 23_000, projects: int = 10, count: TokenCount = words_x_1_3, documents: int = 1
) -> Conversion:
    """Pools the twenty paragraphs of each question with others up to ``tokens``; titles become headers.

    Questions marked as not answerable keep half of their supporting paragraphs, so that no label is true of them:
    they are dropped.
    """
    dropped: Counter[str] = Counter()
    questions = list(_questions(path, dropped))
    records = pooled_records(questions, projects, tokens, count, "musique", dropped, documents)
    extra = {"source": path.name, "document_tokens": tokens, "documents_a_question": documents}
    return Conversion("musique", records, LICENSES, dropped, extra)


def _questions(path: Path, dropped: Counter[str]) -> Iterator[PoolQuestion]:
    seen: set[str] = set()
    for where, row in rows(path):
        name, answer = wanted(where, row, "id", str), wanted(where, row, "answer", str)
        paragraphs = tuple(_paragraph(where, item) for item in wanted(where, row, "paragraphs", list))
        question = PoolQuestion(name, wanted(where, row, "question", str).strip(), _answers(row, answer), paragraphs)
        if name in seen:
            dropped["duplicate_id"] += 1
        elif isinstance(row, dict) and row.get("answerable") is False:
            dropped["not_answerable"] += 1
        elif not question.gold:
            dropped["no_supporting_paragraph"] += 1
        else:
            yield question
        seen.add(name)


def _answers(row: Any, answer: str) -> tuple[str, ...]:
    aliases = row.get("answer_aliases") or []
    return tuple(dict.fromkeys([answer, *(str(alias) for alias in aliases)]))


def _paragraph(where: str, item: object) -> Paragraph:
    text = wanted(where, item, "paragraph_text", str).strip()
    gold = ((0, len(text)),) if wanted(where, item, "is_supporting", bool) and text else ()
    return Paragraph(wanted(where, item, "title", str), text, gold)
