"""Whether an answer is one of the accepted answers, under a matcher that every metric and record names."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Literal

Matcher = Literal["exact", "contains", "f1"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no English articles, single spaces (the normalisation of SQuAD's scorer)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def outcome(answer: str | None, accepted: Sequence[str], matcher: Matcher) -> float:
    """Best agreement of ``answer`` with an accepted answer, in [0, 1]; 0 where there is no answer.

    ``exact``: equal after normalisation. ``contains``: the accepted answer stands in the answer as whole words.
    ``f1``: word F1.
    """
    if answer is None:
        return 0.0
    given = normalize_answer(answer).split()
    return max((_agreement(given, normalize_answer(text).split(), matcher) for text in accepted), default=0.0)


def _agreement(given: list[str], wanted: list[str], matcher: Matcher) -> float:
    if matcher == "exact":
        return float(given == wanted)
    if matcher == "contains":
        width = len(wanted)
        return float(any(given[at : at + width] == wanted for at in range(len(given) - width + 1)))
    common = sum((Counter(given) & Counter(wanted)).values())
    if not given or not wanted:
        return float(given == wanted)
    return 2 * common / (len(given) + len(wanted))
