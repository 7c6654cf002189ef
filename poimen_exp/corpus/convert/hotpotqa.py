"""HotpotQA (distractor setting): evidence is the supporting sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from poimen_exp.corpus.convert import Conversion, TokenCount, read_json, read_json_lines, wanted, words_x_1_3
from poimen_exp.corpus.convert.pools import Paragraph, PoolQuestion, pooled_records
from poimen_exp.errors import CorpusError

LICENSES = ("HotpotQA: CC BY-SA 4.0", "Wikipedia text: CC BY-SA 4.0")


def convert(
    path: Path, tokens: float = 23_000, projects: int = 10, count: TokenCount = words_x_1_3, documents: int = 1
) -> Conversion:
    """Pools the ten paragraphs of each question with others up to ``tokens``; paragraph titles become headers.

    Args:
        path: the set's JSON array, or JSON lines.
        tokens: size of a document, counted by ``count``.
        projects: keys of the split; questions that share gold are in one.
        documents: documents a question, each with its gold and other distractors.
    """
    dropped: Counter[str] = Counter()
    questions = list(_questions(path, dropped))
    records = pooled_records(questions, projects, tokens, count, "hotpotqa", dropped, documents)
    extra = {"source": path.name, "document_tokens": tokens, "documents_a_question": documents}
    return Conversion("hotpotqa", records, LICENSES, dropped, extra)


def _questions(path: Path, dropped: Counter[str]) -> Iterator[PoolQuestion]:
    seen: set[str] = set()
    for where, row in rows(path):
        name, answer = wanted(where, row, "_id", str), wanted(where, row, "answer", str)
        gold: dict[str, set[int]] = {}
        for title, sentence in _pairs(where, wanted(where, row, "supporting_facts", list)):
            gold.setdefault(title, set()).add(sentence)
        context = dict(_context(where, wanted(where, row, "context", list)))
        if name in seen:
            dropped["duplicate_id"] += 1
        elif not gold or any(not 0 <= n < len(context.get(title, ())) for title, at in gold.items() for n in at):
            dropped["supporting_fact_not_in_context"] += 1
        else:
            paragraphs = [_paragraph(title, sentences, gold.get(title, set())) for title, sentences in context.items()]
            with_text = tuple(paragraph for paragraph in paragraphs if paragraph.text.strip())
            yield PoolQuestion(name, wanted(where, row, "question", str).strip(), (answer,), with_text)
        seen.add(name)


def rows(path: Path) -> Iterator[tuple[str, object]]:
    """Rows of a file that is a JSON array or JSON lines, whatever it is called."""
    if not path.is_file():
        raise CorpusError(f"{path}:1: not found, or not a file")
    with path.open("rb") as stream:
        head = stream.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith(b"["):
        for position, row in enumerate(read_json(path)):
            yield f"{path}:1: [{position}]", row
    else:
        yield from read_json_lines(path)


def _pairs(where: str, value: list[object]) -> Iterator[tuple[str, int]]:
    for item in value:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], int)):
            raise CorpusError(f"{where}: supporting_facts: got {item!r:.80}, expected [title, sentence number]")
        yield item[0], item[1]


def _context(where: str, value: list[object]) -> Iterator[tuple[str, list[str]]]:
    for item in value:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], list)):
            raise CorpusError(f"{where}: context: got {item!r:.80}, expected [title, sentences]")
        yield item[0], [str(sentence) for sentence in item[1]]


def _paragraph(title: str, sentences: list[str], gold: set[int]) -> Paragraph:
    text, spans = "", []
    for number, sentence in enumerate(sentences):
        start, text = len(text), text + sentence
        if number in gold and sentence.strip():
            spans.append((start + len(sentence) - len(sentence.lstrip()), start + len(sentence.rstrip())))
    return Paragraph(title, text, tuple(spans))
