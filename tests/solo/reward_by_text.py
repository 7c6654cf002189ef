"""A reward that tells the responses of one prompt apart, however short they are."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Between 0 and 1, by the letters of the text."""
    assert data_source == "poimen/target-length"
    assert ground_truth == ""
    return (sum(map(ord, solution_str)) + extra_info["target_length"]) % 7 / 6
