"""When an answer counts as right."""

from __future__ import annotations

import pytest

from poimen_exp.gates.outcome import Matcher, normalize_answer, outcome


def test_answers_are_compared_without_case_punctuation_articles_and_extra_spaces() -> None:
    assert normalize_answer("  The  Red, red-ish\tCar! ") == "red redish car"


@pytest.mark.parametrize(
    ("answer", "accepted", "exact", "contains", "f1"),
    [
        ("the red car", ["Red car."], 1.0, 1.0, 1.0),
        ("a fast red car", ["red car"], 0.0, 1.0, 0.8),  # 2 common words of 3 and 2: 4 / 5
        ("redcar", ["red"], 0.0, 0.0, 0.0),  # whole words only
        ("blue", ["red", "blue"], 1.0, 1.0, 1.0),  # the best of the accepted answers
        ("red red", ["red"], 0.0, 1.0, 2 / 3),  # a word counts as often as both have it
        (None, ["red"], 0.0, 0.0, 0.0),
        ("", ["red"], 0.0, 0.0, 0.0),
        ("red", [], 0.0, 0.0, 0.0),
    ],
)
def test_the_matchers(answer: str | None, accepted: list[str], exact: float, contains: float, f1: float) -> None:
    matchers: tuple[Matcher, ...] = ("exact", "contains", "f1")
    got = [outcome(answer, accepted, matcher) for matcher in matchers]
    assert got == pytest.approx([exact, contains, f1], abs=1e-12)
