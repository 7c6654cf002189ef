"""Train, validation and test by project: never by trajectory, since those of one project share their words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from poimen_exp.errors import Refused

Side = Literal["train", "val", "test"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class ProjectSplit:
    """Which side each project is on; ``note`` says what the user must know about it, "" if nothing."""

    side_of: Mapping[str, Side]
    note: str = ""

    def projects(self, side: Side) -> tuple[str, ...]:
        """Projects of one side, in alphabetical order."""
        return tuple(sorted(project for project, where in self.side_of.items() if where == side))


def split_projects(projects: Iterable[str], seed: int, val_fraction: float, test_fraction: float) -> ProjectSplit:
    """Ranks projects by SHA-256 of ``seed TAB project``; the first go to test, the next to val, the rest to train.

    Each held-out side gets ``max(1, round(fraction * P))`` of the P projects. The order of ``projects`` changes
    nothing. Two projects: no test side; one: train only. Both are said in ``note``.

    Raises:
        Refused: a fraction outside [0, 1), or nothing left to train on.
    """
    for key, fraction in (("corpus.val_fraction", val_fraction), ("corpus.test_fraction", test_fraction)):
        if not 0 <= fraction < 1:
            raise Refused(f"{key}: got {fraction}, expected at least 0 and below 1")
    ranked = sorted(set(projects), key=lambda project: hashlib.sha256(f"{seed}\t{project}".encode()).digest())
    total = len(ranked)
    n_test = max(1, round(test_fraction * total)) if total >= 3 else 0
    n_val = max(1, round(val_fraction * total)) if total >= 2 else 0
    if total and n_test + n_val >= total:
        raise Refused(
            f"corpus.val_fraction {val_fraction} and corpus.test_fraction {test_fraction} take {n_val} and {n_test} "
            f"of {total} projects and leave none to train on; lower them"
        )
    sides: dict[str, Side] = {}
    for rank, project in enumerate(ranked):
        sides[project] = "test" if rank < n_test else "val" if rank < n_test + n_val else "train"
    return ProjectSplit(sides, _note(total))


def _note(total: int) -> str:
    if total >= 3:
        return ""
    if total == 2:
        return "the corpus has 2 projects: one to train on, one for validation, no test split"
    return f"the corpus has {total} project(s): no validation and no test split; labels need at least 3 projects"
