"""The four panels of Figure 8, for the report and for the W&B workspace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One panel: its title, and the metric on its y axis."""

    title: str
    metric: str


PANELS: tuple[Panel, ...] = (
    Panel("Update accuracy, chunks with evidence", "train/gates/update_accuracy/evidence_present"),
    Panel("Update accuracy, evidence-free chunks", "train/gates/update_accuracy/evidence_free"),
    Panel("Exact exits", "train/gates/exit/exact"),
    Panel("Validation reward", "val/reward/total"),
)
COLORS: tuple[str, ...] = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's, told apart with every common colour vision."""
