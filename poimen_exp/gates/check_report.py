"""What a gate check found: named comparisons, each with what it got and what it expected."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from poimen_exp.errors import Refused

Value = float | str | tuple[float | None, ...]
"""A number, some numbers (None where there is none), or words."""

_CRASHES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_SHOWN = 8


@dataclass(frozen=True)
class NamedCheck:
    """One comparison.

    Attributes:
        where: the task, row or file that it speaks of; empty where the name says it all.
    """

    name: str
    passed: bool
    got: Value
    expected: Value
    where: str = ""

    def line(self) -> str:
        """The comparison in one line."""
        place = f" ({self.where})" if self.where else ""
        got, expected = self.got, self.expected
        if isinstance(got, tuple) and isinstance(expected, tuple) and len(got) == len(expected) > _SHOWN:
            at = max(range(len(got)), key=lambda index: _gap(got[index], expected[index]))
            return f"{self.name}{place}: entry {at}: got {_shown((got[at],))}, expected {_shown((expected[at],))}"
        return f"{self.name}{place}: got {_shown(got)}, expected {_shown(expected)}"


class GateCheckFailed(Refused):
    """The rewards, advantages, loss or corpus of this run would teach the wrong gates."""


@dataclass(frozen=True)
class GateCheckReport:
    """Every comparison of one gate check, in the order they were made."""

    checks: tuple[NamedCheck, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether there are comparisons and all of them hold."""
        return bool(self.checks) and not self.failed

    @property
    def failed(self) -> tuple[NamedCheck, ...]:
        """The comparisons that do not hold."""
        return tuple(check for check in self.checks if not check.passed)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; numbers that JSON cannot hold become words."""
        return {
            "passed": self.passed,
            "failed": len(self.failed),
            "seconds": round(self.seconds, 3),
            "checks": [
                {
                    "name": check.name,
                    "passed": check.passed,
                    "got": _plain(check.got),
                    "expected": _plain(check.expected),
                    "where": check.where,
                }
                for check in self.checks
            ],
        }

    def require(self) -> None:
        """Nothing if the check passed.

        Raises:
            GateCheckFailed: naming every comparison that does not hold, with its numbers.
        """
        if self.passed:
            return
        lines = "\n".join(f"  - {check.line()}" for check in self.failed) or "  - nothing was compared"
        raise GateCheckFailed(
            f"gate check: {len(self.failed)} of {len(self.checks)} checks failed; nothing was trained.\n{lines}\n"
            "Correct what these lines name (the corpus labels, or the code of rewards, advantages and loss)."
        )


class Recorder:
    """Collects comparisons under a section's name."""

    def __init__(self) -> None:
        self.checks: list[NamedCheck] = []
        self._section = ""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Comparisons made inside are called ``name/...``; code that raises inside is a failed comparison."""
        self._section = name
        try:
            yield
        except _CRASHES as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            self.words("runs", f"{type(error).__name__}: {error}", "no error", passed=False, where=place)

    def equal(
        self,
        name: str,
        got: Sequence[float | None] | float | None,
        expected: Sequence[float | None] | float | None,
        *,
        tolerance: float = 1e-6,
        where: str = "",
    ) -> None:
        """Numbers that must agree within ``tolerance``; None only equals None."""
        mine, wanted = _numbers(got), _numbers(expected)
        same = len(mine) == len(wanted) and all(
            a is b if a is None or b is None else abs(a - b) <= tolerance for a, b in zip(mine, wanted, strict=True)
        )
        self._add(name, same, mine, wanted, where)

    def above(self, name: str, got: float, bound: float, *, where: str = "") -> None:
        """A number that must be greater than ``bound``."""
        self._add(name, got > bound, float(got), f"above {bound:.6g}", where)

    def words(self, name: str, got: str, expected: str, *, passed: bool, where: str = "") -> None:
        """A comparison that the caller made."""
        self._add(name, passed, got, expected, where)

    def _add(self, name: str, passed: bool, got: Value, expected: Value, where: str) -> None:
        self.checks.append(NamedCheck(f"{self._section}/{name}", bool(passed), got, expected, where))


def _numbers(value: Sequence[float | None] | float | None) -> tuple[float | None, ...]:
    listed = value if isinstance(value, Sequence) else (value,)
    return tuple(None if item is None else float(item) for item in listed)


def _gap(got: float | None, expected: float | None) -> float:
    if got is None or expected is None:
        return 0.0 if got is expected else math.inf
    return abs(got - expected) if math.isfinite(got) else math.inf


def _shown(value: Value) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, tuple):
        return f"{value:.6g}"
    inner = ", ".join("none" if item is None else f"{item:.6g}" for item in value[:_SHOWN])
    if len(value) == 1:
        return inner
    return f"[{inner}{f', ... {len(value)} numbers' if len(value) > _SHOWN else ''}]"


def _plain(value: Value) -> Any:
    if isinstance(value, tuple):
        return [_plain_number(item) for item in value]
    return value if isinstance(value, str) else _plain_number(value)


def _plain_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
