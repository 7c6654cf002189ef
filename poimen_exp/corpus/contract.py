"""The kappa contract: labels by labelers are used only with a measured, independent, sufficient agreement."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

KAPPA_TOLERANCE = 1e-3
MIN_POSITIVES = 30
MIN_PROJECTS = 3
DESIGN = "independent_blind"
_UNDEFINED_CELLS = (("pp", "pn"), ("np", "nn"), ("pp", "np"), ("pn", "nn"))


@dataclass(frozen=True)
class Chunking:
    """How documents are cut: kappa holds for one chunking only."""

    chunk_tokens: int
    tokenizer_sha256: str


@dataclass(frozen=True)
class Confusion:
    """Units by the two labelers' verdicts: first letter labeler 1, second labeler 2; p positive, n negative."""

    pp: int
    pn: int
    np: int
    nn: int

    @property
    def total(self) -> int:
        return self.pp + self.pn + self.np + self.nn

    @property
    def positives(self) -> tuple[int, int]:
        """Units that labeler 1 and labeler 2 call positive."""
        return self.pp + self.pn, self.pp + self.np

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa; None where a labeler used one class only, which leaves it undefined (never 1.0)."""
        if any(getattr(self, first) + getattr(self, second) == 0 for first, second in _UNDEFINED_CELLS):
            return None
        n = self.total
        first, second = self.positives
        chance = (first * second + (n - first) * (n - second)) / (n * n)
        return ((self.pp + self.nn) / n - chance) / (1 - chance)


@dataclass(frozen=True)
class Agreement:
    """A measured agreement block. ``chunking`` None: the measured chunks stand in the file itself."""

    kappa: float
    confusion: Confusion
    labelers: tuple[str, str]
    n_trajectories: int
    n_projects: int
    labels_sha256: str
    chunk_tokens: int | None
    tokenizer_sha256: str | None


@dataclass(frozen=True)
class LabelBlock:
    """Where the labels of one gate come from; "unknown" only if unmeasured labels were allowed."""

    origin: Literal["constructed", "labeled", "unknown"]
    agreement: Agreement | None = None


@dataclass(frozen=True)
class Problem:
    """Why a block is refused; ``keys`` lead from the gate's block to the value."""

    message: str
    keys: tuple[str, ...] = ()


def read_block(gate: str, labels: object) -> tuple[LabelBlock, Problem | None]:
    """The block of one gate out of the manifest's ``labels``, or what keeps it from being one."""
    where = f"labels.{gate}"
    unknown = LabelBlock("unknown")
    block = labels.get(gate) if isinstance(labels, dict) else None
    if not isinstance(block, dict):
        return unknown, Problem(f"{where}: got {block!r}, expected an object; both update and exit are needed")
    origin = block.get("origin")
    if origin == "constructed":
        return LabelBlock("constructed"), None
    if origin != "labeled":
        return unknown, Problem(f"{where}.origin: got {origin!r}, expected 'constructed' or 'labeled'", ("origin",))
    agreement = block.get("agreement")
    if not isinstance(agreement, dict):
        return LabelBlock("labeled"), Problem(
            f"{where}.agreement: got {agreement!r}; labels by labelers need a measured agreement "
            "(poimen corpus agreement), or corpus.allow_unmeasured=true",
            ("agreement",),
        )
    problem = _refusal(f"{where}.agreement", agreement)
    if problem is not None:
        return LabelBlock("labeled"), Problem(problem.message, ("agreement", *problem.keys))
    return LabelBlock("labeled", _build(agreement)), None


def check_block(gate: str, block: LabelBlock, min_kappa: float, chunking: Chunking | None) -> Problem | None:
    """What speaks against a well-formed block in this run: another chunking, or too low a kappa."""
    agreement = block.agreement
    if agreement is None:
        return None
    where = f"labels.{gate}.agreement"
    if chunking is not None and agreement.chunk_tokens not in (None, chunking.chunk_tokens):
        return Problem(
            f"{where}.chunk_tokens: kappa was measured on chunks of {agreement.chunk_tokens} tokens, this run has "
            f"corpus.chunk_tokens = {chunking.chunk_tokens}; measure again, or use that size",
            ("agreement", "chunk_tokens"),
        )
    if chunking is not None and agreement.tokenizer_sha256 not in (None, chunking.tokenizer_sha256):
        return Problem(
            f"{where}.tokenizer_sha256: kappa was measured on chunks by tokenizer {agreement.tokenizer_sha256}, this "
            f"run's is {chunking.tokenizer_sha256}; measure again with the model's tokenizer",
            ("agreement", "tokenizer_sha256"),
        )
    if agreement.kappa < min_kappa:
        return Problem(
            f"{where}.kappa: {agreement.kappa:.3f} is below corpus.min_kappa = {min_kappa}; the labels are not "
            "reliable enough to train on",
            ("agreement", "kappa"),
        )
    return None


def same_labeler(one: str, other: str) -> bool:
    """Whether two names are of one labeler: case and outer white space do not count."""
    return one.strip().casefold() == other.strip().casefold()


def _refusal(where: str, block: dict[str, Any]) -> Problem | None:
    for check in _CHECKS:
        problem = check(where, block)
        if problem is not None:
            return problem
    return None


def _kappa_value(where: str, block: dict[str, Any]) -> Problem | None:
    keys = ("kappa",)
    if "kappa" not in block:
        return Problem(f"{where}.kappa: missing; write the measured Cohen's kappa")
    kappa = block["kappa"]
    if kappa is None:
        return Problem(f"{where}.kappa: got null: not measured", keys)
    if isinstance(kappa, bool) or not isinstance(kappa, int | float):
        return Problem(f"{where}.kappa: got {kappa!r}, expected a number", keys)
    if isinstance(kappa, float) and math.isnan(kappa):
        return Problem(f"{where}.kappa: got NaN: undefined is not measured", keys)
    if not -1 <= kappa <= 1:
        return Problem(f"{where}.kappa: got {kappa}, out of range: expected -1 to 1", keys)
    return None


def _design(where: str, block: dict[str, Any]) -> Problem | None:
    if block.get("design") == DESIGN:
        return None
    return Problem(
        f"{where}.design: got {block.get('design')!r}, expected {DESIGN!r}: a labeler who saw the other's labels "
        "agrees by default",
        ("design",),
    )


def _labelers(where: str, block: dict[str, Any]) -> Problem | None:
    labelers = block.get("labelers")
    keys = ("labelers",)
    if not isinstance(labelers, list) or len(labelers) != 2 or not all(isinstance(one, str) for one in labelers):
        return Problem(f"{where}.labelers: got {labelers!r}, expected the names of the two labelers", keys)
    if same_labeler(*labelers):
        return Problem(f"{where}.labelers: got {labelers!r}, expected two different labelers", keys)
    return None


def _confusion(where: str, block: dict[str, Any]) -> Problem | None:
    cells, keys = block.get("confusion"), ("confusion",)
    names = ("pp", "pn", "np", "nn")
    if not isinstance(cells, dict) or any(not _is_count(cells.get(name)) for name in names):
        return Problem(f"{where}.confusion: got {cells!r}, expected counts pp, pn, np and nn", keys)
    confusion = Confusion(*(cells[name] for name in names))
    n_units = block.get("n_units")
    if n_units != confusion.total or isinstance(n_units, bool):
        return Problem(
            f"{where}.n_units: got {n_units!r}, expected {confusion.total}, the sum of confusion", ("n_units",)
        )
    if confusion.kappa is None:
        return Problem(f"{where}.confusion: a zero marginal (one class only): kappa is undefined", keys)
    if abs(confusion.kappa - block["kappa"]) > KAPPA_TOLERANCE:
        return Problem(f"{where}.kappa: got {block['kappa']}, but confusion gives {confusion.kappa:.4f}", ("kappa",))
    if min(confusion.positives) < MIN_POSITIVES:
        return Problem(
            f"{where}.confusion: the labelers have {confusion.positives[0]} and {confusion.positives[1]} positives, "
            f"expected at least {MIN_POSITIVES} each; label a larger sample",
            keys,
        )
    return None


def _sample(where: str, block: dict[str, Any]) -> Problem | None:
    projects, trajectories = block.get("n_projects"), block.get("n_trajectories")
    if not _is_count(projects) or projects < MIN_PROJECTS:
        return Problem(
            f"{where}.n_projects: got {projects!r}, expected at least {MIN_PROJECTS} projects in the sample",
            ("n_projects",),
        )
    if not _is_count(trajectories) or trajectories < projects:
        return Problem(
            f"{where}.n_trajectories: got {trajectories!r}, expected a count not below n_projects = {projects}",
            ("n_trajectories",),
        )
    return None


def _hashes(where: str, block: dict[str, Any]) -> Problem | None:
    if not _is_sha256(block.get("labels_sha256")):
        return Problem(
            f"{where}.labels_sha256: got {block.get('labels_sha256')!r}, expected 64 lower-case hex digits",
            ("labels_sha256",),
        )
    missing = [key for key in ("chunk_tokens", "tokenizer_sha256") if key not in block]
    if missing:
        return Problem(f"{where}.{missing[0]}: missing; kappa holds for one chunking only")
    size, tokenizer = block["chunk_tokens"], block["tokenizer_sha256"]
    if size is not None and (not _is_count(size) or size < 1):
        return Problem(f"{where}.chunk_tokens: got {size!r}, expected a number of tokens, or null", ("chunk_tokens",))
    if tokenizer is not None and not _is_sha256(tokenizer):
        return Problem(
            f"{where}.tokenizer_sha256: got {tokenizer!r}, expected 64 lower-case hex digits, or null",
            ("tokenizer_sha256",),
        )
    return None


_CHECKS: tuple[Callable[[str, dict[str, Any]], Problem | None], ...] = (
    _kappa_value,
    _design,
    _labelers,
    _confusion,
    _sample,
    _hashes,
)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _build(block: dict[str, Any]) -> Agreement:
    cells = block["confusion"]
    return Agreement(
        kappa=float(block["kappa"]),
        confusion=Confusion(cells["pp"], cells["pn"], cells["np"], cells["nn"]),
        labelers=(block["labelers"][0], block["labelers"][1]),
        n_trajectories=block["n_trajectories"],
        n_projects=block["n_projects"],
        labels_sha256=block["labels_sha256"],
        chunk_tokens=block["chunk_tokens"],
        tokenizer_sha256=block["tokenizer_sha256"],
    )
