"""No document and no gold text on two sides of a split."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from poimen_exp.corpus.index import CorpusIndex
from poimen_exp.corpus.lines import Report
from poimen_exp.corpus.split import SIDES, ProjectSplit


def check_overlap(index: CorpusIndex, split: ProjectSplit, report: Report) -> None:
    """Reports text that stands on two sides: whole documents, own chunks, and evidence of some length.

    Near-duplicates are the business of ``poimen corpus check``.
    """
    side_of = np.array([_side_number(split, project) for project in index.projects], np.int64)
    documents, tasks, gold = index.documents, index.tasks, index.gold
    own = tasks[tasks["document"] < 0]
    histories = np.concatenate(
        [documents[["file", "line", "project", "text"]], own[["file", "line", "project", "text"]]]
    )
    _report_crossing("the same history", histories, side_of, index, report)
    evidence = tasks[gold["task"]][["file", "line", "project", "text"]].copy()
    evidence["text"] = gold["text"]
    _report_crossing("the same evidence text", evidence, side_of, index, report)


def _side_number(split: ProjectSplit, project: str) -> int:
    side = split.side_of.get(project)
    return -1 if side is None else SIDES.index(side)


def _report_crossing(what: str, rows: Any, side_of: npt.NDArray[np.int64], index: CorpusIndex, report: Report) -> None:
    """Reports each neighbour pair of equal text hash on different sides; projects without tasks have no side."""
    rows = rows[side_of[rows["project"]] >= 0]
    sides = side_of[rows["project"]]
    order = np.lexsort((sides, rows["text"]))
    rows, sides = rows[order], sides[order]
    crossing = (rows["text"][1:] == rows["text"][:-1]) & (sides[1:] != sides[:-1])
    for position in np.flatnonzero(crossing):
        first, second = rows[position], rows[position + 1]
        file, line = index.place(second)
        other, other_line = index.place(first)
        report(
            file,
            line,
            f"{what} is at {other}:{other_line}; projects {index.projects[int(second['project'])]!r} and "
            f"{index.projects[int(first['project'])]!r} are on the {SIDES[int(sides[position + 1])]} and "
            f"{SIDES[int(sides[position])]} side of the split; give both one project",
        )
