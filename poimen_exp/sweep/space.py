"""What a command line sweeps over: axes in the order they were given, and the overrides that stay fixed."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Transformer

from poimen_exp.errors import Refused

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader

log = logging.getLogger(__name__)

RESUME_KEY = "sweep.resume"


@dataclass(frozen=True)
class Value:
    """One value of a swept key, as Hydra would write it in an override: 0.9 is ``0.9``, 1.0 stays ``1.0``."""

    text: str
    number: float | None
    """The value where it is a number (not a boolean), for Optuna; None for everything else."""

    @property
    def identity(self) -> str:
        """Equal for 1, 1.0 and 1.00: a point that was run as one of them was run."""
        return self.text if self.number is None else repr(self.number)


@dataclass(frozen=True)
class Choices:
    """A swept key with listed values: crossed with every other one."""

    key: str
    """As written in an override, ``+`` included."""
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Interval:
    """A swept key with bounds: sampled by TPE."""

    key: str
    low: float
    high: float
    is_int: bool
    log: bool


Point = dict[str, Value]
"""Override key to value, in the order of the axes."""


@dataclass(frozen=True)
class Space:
    """The axes of a sweep and the overrides that all its trials share."""

    choices: tuple[Choices, ...]
    intervals: tuple[Interval, ...]
    fixed: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Swept keys as dotted paths or group names, sorted."""
        return tuple(
            sorted(bare_key(key) for key in (*(a.key for a in self.choices), *(a.key for a in self.intervals)))
        )

    def grid(self) -> Iterator[Point]:
        """Every combination of the listed values, the last axis fastest; one empty point where there is none."""
        for values in itertools.product(*(axis.values for axis in self.choices)):
            yield dict(zip((axis.key for axis in self.choices), values, strict=True))


def bare_key(key: str) -> str:
    """The key without ``+`` or ``++``."""
    return key.lstrip("+")


def overrides_of(point: Mapping[str, Value]) -> list[str]:
    """The point as Hydra overrides."""
    return [f"{key}={value.text}" for key, value in point.items()]


def parse_space(params: Mapping[str, Any], arguments: Sequence[str], loader: ConfigLoader | None = None) -> Space:
    """The space of ``hydra.sweeper.params`` under the command line, whose word for a key wins.

    Args:
        params: key to sweep text (``"0.9,1.0"``, ``"interval(0.5, 1.0)"``), from a sweep group.
        arguments: overrides of the command line.
        loader: Hydra's config loader, for ``glob(...)`` over the options of a group.

    Raises:
        Refused: an empty sweep, or bounds that are not an interval.
    """
    parser = OverridesParser.create(config_loader=loader)
    declared = parser.parse_overrides([f"{key}={_text(value)}" for key, value in params.items()])
    typed = parser.parse_overrides(list(arguments))
    latest = {_owner(override): override for override in (*declared, *typed)}
    for override in declared:
        winner = latest[_owner(override)]
        if override.is_sweep_override() and not winner.is_sweep_override():
            log.warning(
                "%s is fixed on the command line: the sweep over %s is not run", winner.input_line, override.input_line
            )
    swept = [override for override in latest.values() if override.is_sweep_override()]
    replaced = {_owner(override) for override in swept}
    # A key that the command line fixes twice stays twice: Hydra says what that means, as in a single run.
    fixed = [o for o in declared if latest[_owner(o)] is o] + [o for o in typed if _owner(o) not in replaced]
    fixed = [o for o in fixed if not o.is_sweep_override()]
    return Space(
        choices=tuple(_choices(o) for o in swept if o.is_discrete_sweep()),
        intervals=tuple(_interval(o) for o in swept if o.is_interval_sweep()),
        fixed=tuple(str(o.input_line) for o in fixed if _owner(o) != RESUME_KEY),
    )


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _owner(override: Override) -> str:
    return override.key_or_group if override.package is None else f"{override.key_or_group}@{override.package}"


def _choices(override: Override) -> Choices:
    # One pass: a shuffled sweep has another order the next time.
    elements = list(override.sweep_iterator())
    if not elements:
        raise Refused(f"{override.input_line}: the sweep has no value; give at least one, as in key=a,b")
    values: dict[str, Value] = {}
    for element in elements:
        value = Value(str(Transformer.str(element)), _number(element))
        if value.identity in values:
            log.warning("%s: %s is given twice and run once", override.input_line, value.text)
        values.setdefault(value.identity, value)
    return Choices(override.get_key_element(), tuple(values.values()))


def _number(element: Any) -> float | None:
    if isinstance(element, bool) or not isinstance(element, int | float):
        return None
    number = float(element)
    # Integers beyond 2^53 would fall together as floats.
    return number if number == element and math.isfinite(number) else None


def _interval(override: Override) -> Interval:
    sweep = override.value()
    assert isinstance(sweep, IntervalSweep)
    assert sweep.start is not None
    assert sweep.end is not None
    low, high, is_log = float(sweep.start), float(sweep.end), "log" in sweep.tags
    if not low < high or (is_log and low <= 0):
        raise Refused(
            f"{override.input_line}: got the bounds {low:g} and {high:g}, expected low < high"
            f"{' and low > 0 on a log scale' if is_log else ''}"
        )
    is_int = isinstance(sweep.start, int) and isinstance(sweep.end, int) and "float" not in sweep.tags
    return Interval(override.get_key_element(), low, high, is_int, is_log)
