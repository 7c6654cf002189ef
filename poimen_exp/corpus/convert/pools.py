"""Multi-hop questions over ten or twenty paragraphs: projects that share no gold, and long pooled documents."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from poimen_exp.corpus.convert import TokenCount
from poimen_exp.corpus.index import is_distinctive
from poimen_exp.errors import CorpusError

SHORT_ANSWER_WORDS = 6


@dataclass(frozen=True)
class Paragraph:
    """A titled paragraph; ``gold`` holds the character spans of its text that are evidence."""

    title: str
    text: str
    gold: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> str:
        return self.text.casefold().strip()


@dataclass(frozen=True)
class PoolQuestion:
    """A question with the paragraphs that came with it."""

    question_id: str
    question: str
    answers: tuple[str, ...]
    paragraphs: tuple[Paragraph, ...]

    @property
    def gold(self) -> tuple[Paragraph, ...]:
        return tuple(paragraph for paragraph in self.paragraphs if paragraph.gold)


def assign_projects(questions: Sequence[PoolQuestion], count: int, prefix: str) -> dict[str, str]:
    """Project of each question id: questions that share gold are one component, components fill ``count`` projects.

    Shared gold is an equal gold paragraph or an equal evidence text. Large components are placed first, each into
    the project with the fewest questions; ties and names follow hashes of ids, not the order of rows.
    """
    components = sorted(_components(questions), key=lambda ids: (-len(ids), _digest(ids[0])))
    projects: list[list[str]] = [[] for _ in range(min(count, len(components)))]
    for ids in components:
        min(projects, key=len).extend(ids)
    width = len(str(max(1, len(projects) - 1)))
    return {name: f"{prefix}-{number:0{width}d}" for number, names in enumerate(projects) for name in names}


def _components(questions: Sequence[PoolQuestion]) -> list[list[str]]:
    parent = {question.question_id: question.question_id for question in questions}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    owner: dict[str, str] = {}
    for question in questions:
        for key in _gold_keys(question):
            parent[root(question.question_id)] = root(owner.setdefault(key, question.question_id))
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in parent:
        groups[root(name)].append(name)
    return [sorted(names) for names in groups.values()]


def _gold_keys(question: PoolQuestion) -> Iterator[str]:
    for paragraph in question.gold:
        yield paragraph.key
        for start, end in paragraph.gold:
            if is_distinctive(paragraph.text[start:end]):
                yield paragraph.text[start:end]


def pooled_records(
    questions: Sequence[PoolQuestion],
    projects: int,
    tokens: float,
    count: TokenCount,
    prefix: str,
    dropped: Counter[str],
    documents: int = 1,
) -> Iterator[Mapping[str, Any]]:
    """``documents`` documents for each question, and a trajectory for each of them.

    The first has the question's own paragraphs and distractors out of its own project's, up to ``tokens``; the others
    its gold and other draws. The order is by the hash of the document's id and paragraph, so that the place of a
    paragraph says nothing about it. No document holds another project's gold; an own distractor that is one is left
    out and counted, and so is a document that equals another one of its question.

    Raises:
        CorpusError: the id of a further document is a question's.
    """
    project_of = assign_projects(questions, projects, prefix)
    pools: defaultdict[str, dict[str, Paragraph]] = defaultdict(dict)
    gold_project: dict[str, str] = {}
    for question in questions:
        project = project_of[question.question_id]
        for paragraph in question.paragraphs:
            pools[project].setdefault(paragraph.key, Paragraph(paragraph.title, paragraph.text))
        for paragraph in question.gold:
            gold_project[paragraph.key] = project
    costs = {key: count(f"{one.title}\n{one.text}\n") for pool in pools.values() for key, one in pool.items()}
    for question in questions:
        project = project_of[question.question_id]
        foreign = {key for key, where in gold_project.items() if where != project}
        own = [one for one in question.paragraphs if one.gold or one.key not in foreign]
        dropped["paragraph_is_gold_of_another_project"] += len(question.paragraphs) - len(own)
        usable = [one for key, one in pools[project].items() if key not in foreign]
        made: set[tuple[str, ...]] = set()
        for number in range(documents):
            document_id = f"{question.question_id}-{number + 1}" if number else question.question_id
            if number and document_id in project_of:
                raise CorpusError(f"documents {documents}: {document_id!r} is the id of a question too")
            kept = list(question.gold) if number else own
            chosen = kept + _distractors(question, document_id, kept, usable, tokens, costs)
            chosen.sort(key=partial(_place, document_id))
            order = tuple(one.key for one in chosen)
            if order in made:
                dropped["document_equals_another_of_its_question"] += 1
                continue
            made.add(order)
            yield from _records(question, document_id, project, chosen)
    if not dropped["paragraph_is_gold_of_another_project"]:
        del dropped["paragraph_is_gold_of_another_project"]


def _distractors(
    question: PoolQuestion,
    document_id: str,
    own: Sequence[Paragraph],
    pool: Iterable[Paragraph],
    tokens: float,
    costs: Mapping[str, float],
) -> list[Paragraph]:
    """Paragraphs of the pool in an order of the document's own, until ``tokens`` are reached.

    Not taken: paragraphs already there, versions of a gold one (same title), and paragraphs that spell a short
    answer, which would be evidence labelled as none.
    """
    taken = {paragraph.key for paragraph in own}
    titles = {paragraph.title.casefold() for paragraph in question.gold}
    spelled = "|".join(rf"(?<!\w){re.escape(one.casefold())}(?!\w)" for one in question.answers if _is_short(one))
    used = sum(costs[paragraph.key] for paragraph in own)
    chosen: list[Paragraph] = []
    for paragraph in sorted(pool, key=lambda one: _digest(f"{document_id}\tdraw\t{one.key}")):
        if used >= tokens:
            break
        if paragraph.key in taken or paragraph.title.casefold() in titles:
            continue
        if spelled and re.search(spelled, f"{paragraph.title.casefold()}\n{paragraph.key}"):
            continue
        if used + costs[paragraph.key] <= tokens:
            used += costs[paragraph.key]
            chosen.append(paragraph)
    return chosen


def _is_short(answer: str) -> bool:
    return answer.casefold() not in ("yes", "no") and 0 < len(answer.split()) <= SHORT_ANSWER_WORDS


def _records(
    question: PoolQuestion, document_id: str, project: str, paragraphs: Sequence[Paragraph]
) -> Iterator[Mapping[str, Any]]:
    units, evidence = [], []
    for position, paragraph in enumerate(paragraphs):
        unit_id = f"u{position}"
        units.append({"unit_id": unit_id, "text": paragraph.text, "header": paragraph.title})
        evidence += [{"unit_id": unit_id, "start": start, "end": end} for start, end in paragraph.gold]
    yield {"type": "document", "document_id": document_id, "project": project, "units": units}
    yield {
        "type": "trajectory",
        "trajectory_id": document_id,
        "document_id": document_id,
        "question": question.question,
        "answers": list(question.answers),
        "evidence": evidence,
    }


def _place(document_id: str, paragraph: Paragraph) -> bytes:
    return _digest(f"{document_id}\t{paragraph.key}")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
