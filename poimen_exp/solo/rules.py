"""What a rule of the plan is, and the values that rules read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from poimen_exp.errors import Refused

Disposition = Literal[
    "exact",  # value and unit feed the same meaning
    "semantically_conformant",  # represented otherwise, tested to mean the same
    "locally_lowered",  # done otherwise on one device, the objective is kept
    "informational_only",  # inactive for the selected algorithm
    "distributed_only",  # places work on a cluster: nothing to do on one device
    "not_implemented",  # would mean something on one device, solo does not do it
    "unsupported",  # no rule says what it means
]

Leaves = Mapping[str, Any]
"""Dotted verl leaf -> resolved value."""

Convert = Callable[[Any, Leaves], Any]


def as_is(value: Any, _: Leaves) -> Any:
    """The value itself."""
    return value


@dataclass(frozen=True)
class Rule:
    """What solo does with the leaves that ``pattern`` matches (``*`` matches dots too); the first match counts.

    Attributes:
        targets: fields of ``SoloSettings`` that the value feeds.
        convert: value and all leaves -> value of the field; raises ``Refused`` with what it expected.
        accepts: values taken beside verl's default, where nothing is converted.
        same_as: a leaf whose value is taken too, where nothing is converted.
        lowering: what is done instead; only where the disposition is ``locally_lowered``.
        when: whether the leaf has a part in a run of these leaves; ``idle`` says why it has none elsewhere.
    """

    pattern: str
    disposition: Disposition
    reason: str
    targets: tuple[str, ...] = ()
    convert: Convert = as_is
    accepts: tuple[Any, ...] = ()
    same_as: str | None = None
    lowering: str | None = None
    when: Callable[[Leaves], bool] | None = None
    idle: str = ""

    def within(self, leaves: Leaves) -> Rule:
        """The rule as it holds in a run of these leaves."""
        if self.when is None or self.when(leaves):
            return self
        return Rule(self.pattern, "informational_only", self.idle)

    @property
    def reads(self) -> bool:
        """Whether any value that converts is taken; else only verl's default, ``accepts`` and ``same_as`` are."""
        return bool(self.targets) or self.convert is not as_is


def _fields(target: str) -> tuple[str, ...]:
    return tuple(filter(None, target.split(",")))


def exact(pattern: str, target: str, convert: Convert, reason: str = "read as verl reads it") -> Rule:
    """A leaf that feeds one or more (comma-separated) fields under verl's meaning."""
    return Rule(pattern, "exact", reason, _fields(target), convert)


def conformant(
    pattern: str, reason: str, target: str = "", convert: Convert = as_is, accepts: tuple[Any, ...] = ()
) -> Rule:
    """A leaf whose meaning is kept under another representation."""
    return Rule(pattern, "semantically_conformant", reason, _fields(target), convert, accepts)


KEPT = "done otherwise on one device; the objective is kept"


def lowered(
    pattern: str,
    lowering: str,
    target: str = "",
    convert: Convert = as_is,
    accepts: tuple[Any, ...] = (),
) -> Rule:
    """A leaf whose work is done otherwise on one device; ``lowering`` says how."""
    return Rule(pattern, "locally_lowered", KEPT, _fields(target), convert, accepts, lowering=lowering)


def inactive(pattern: str, reason: str, accepts: tuple[Any, ...] = ()) -> Rule:
    """A leaf that the gates estimator does not use."""
    return Rule(pattern, "informational_only", reason, accepts=accepts)


def placement(pattern: str, reason: str, accepts: tuple[Any, ...] = ()) -> Rule:
    """A leaf that places work on devices that a solo run has not."""
    return Rule(pattern, "distributed_only", reason, accepts=accepts)


def missing(pattern: str, reason: str, accepts: tuple[Any, ...] = ()) -> Rule:
    """A leaf that solo does not honour yet."""
    return Rule(pattern, "not_implemented", reason, accepts=accepts)


def whole(least: int) -> Convert:
    """A whole number from ``least`` up."""

    def convert(value: Any, _: Leaves) -> int:
        if type(value) is not int or value < least:
            raise Refused(f"expected a whole number, {least} or more")
        return value

    return convert


def number(least: float = -math.inf, most: float = math.inf, above: float | None = None) -> Convert:
    """A finite number in [least, most], above ``above`` if given."""
    span = f" above {above:g}" if above is not None else "" if least == -math.inf else f" from {least:g}"
    span += "" if most == math.inf else f" to {most:g}"

    def convert(value: Any, _: Leaves) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not least <= value <= most or (above is not None and value <= above):
            raise Refused(f"expected a number{span}")
        return float(value)

    return convert


def equal_to(leaf: str) -> Convert:
    """The value of another leaf, and no other."""

    def convert(value: Any, leaves: Leaves) -> Any:
        if value != leaves[leaf]:
            raise Refused(f"expected {leaves[leaf]!r}, the value of {leaf}")
        return value

    return convert


def flag(value: Any, _: Leaves) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise Refused("expected true or false")
    return value


def one_of(*choices: str) -> Convert:
    """One of a few words."""

    def convert(value: Any, _: Leaves) -> str:
        if value not in choices:
            raise Refused(f"expected {' or '.join(choices)}")
        return str(value)

    return convert


def frequency(value: Any, _: Leaves) -> int:
    """Steps between two events; verl's -1 and 0 both mean never and become -1."""
    if type(value) is not int or value < -1:
        raise Refused("expected a whole number of steps, or -1 for never")
    return value or -1


def text(value: Any, _: Leaves) -> str:
    """Any text but an empty one."""
    if not isinstance(value, str) or not value:
        raise Refused("expected a text")
    return value


def optional_count(value: Any, leaves: Leaves) -> int | None:
    """A positive whole number, or None for no limit."""
    return None if value is None else whole(1)(value, leaves)


def group_size(value: Any, leaves: Leaves) -> int:
    """Rollouts a prompt."""
    try:
        return int(whole(2)(value, leaves))
    except Refused:
        raise Refused("expected a whole number, 2 or more: a group of one has no baseline") from None


def train_temperature(value: Any, leaves: Leaves) -> float:
    """Of the rollouts that are trained on."""
    try:
        return float(number(above=0)(value, leaves))
    except Refused:
        raise Refused(
            "expected a number above 0: greedy rollouts of one prompt are all alike and teach nothing"
        ) from None


def train_top_p(value: Any, _: Leaves) -> float:
    """1: log-probs are those before top-p, so that a smaller value biases the ratio of the loss."""
    if value != 1:
        raise Refused("expected 1.0 in training: a smaller top_p biases the policy ratio (val_kwargs.top_p is free)")
    return 1.0


def train_top_k(value: Any, _: Leaves) -> int:
    """-1: see ``train_top_p``."""
    if value not in (-1, 0):
        raise Refused("expected -1 in training: a top_k biases the policy ratio (val_kwargs.top_k is free)")
    return -1


def top_k(value: Any, _: Leaves) -> int:
    """Of validation; -1 and 0 switch it off."""
    if type(value) is not int or value < -1:
        raise Refused("expected a whole number, or -1 for no limit")
    return value or -1


def val_temperature(value: Any, leaves: Leaves) -> float:
    """0 (greedy) where ``do_sample`` is false, as verl does."""
    temperature = float(number(least=0)(value, leaves))
    return temperature if leaves["actor_rollout_ref.rollout.val_kwargs.do_sample"] else 0.0


def total_steps(value: Any, leaves: Leaves) -> int:
    """Steps of the run."""
    if value is None:
        raise Refused("expected a whole number: solo counts steps, not epochs")
    return int(whole(1)(value, leaves))


def betas(value: Any, leaves: Leaves) -> tuple[float, float]:
    """Of AdamW."""
    if not isinstance(value, list) or len(value) != 2:
        raise Refused("expected two numbers from 0 to 1")
    first, second = (float(number(0, 1)(beta, leaves)) for beta in value)
    return first, second


def modules(value: Any, _: Leaves) -> tuple[str, ...] | str:
    """LoRA's target modules: a name, a pattern, or a list of names."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise Refused("expected all-linear or a list of module names")


def lora_rank(value: Any, leaves: Leaves) -> int:
    """Of the adapter."""
    try:
        return int(whole(1)(value, leaves))
    except Refused:
        raise Refused(
            "expected a whole number, 1 or more: without LoRA no parameter is trained "
            "(actor_rollout_ref.model.lora_rank=16)"
        ) from None


_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}


def dtype(value: Any, _: Leaves) -> str:
    """Of the base weights and the forward passes, under its torch name."""
    if value not in _DTYPES:
        raise Refused("expected bfloat16 or float32")
    return _DTYPES[value]


def model_folder(value: Any, _: Leaves) -> Path:
    """A folder with a Hugging Face model."""
    folder = Path(str(value)).expanduser()
    if not folder.is_dir():
        raise Refused(
            "expected the folder of a downloaded model (+experiment=quickstart ships one): there is no such folder"
        )
    if not (folder / "config.json").is_file():
        raise Refused("expected the folder of a downloaded model: it has no config.json")
    return folder


def adapter_folder(value: Any, _: Leaves) -> Path | None:
    """A PEFT folder to start from, or None."""
    if value is None:
        return None
    folder = Path(str(value)).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise Refused("expected a PEFT folder: it has no adapter_config.json")
    return folder


def attention(value: Any, _: Leaves) -> str:
    """``override_config`` may only choose the attention kernel; sdpa where it does not."""
    others = sorted(set(value or {}) - {"attn_implementation"})
    if others:
        raise Refused(f"expected attn_implementation alone: {', '.join(others)} would change the model")
    chosen = (value or {}).get("attn_implementation", "sdpa")
    if chosen not in ("sdpa", "eager", "flash_attention_2"):
        raise Refused("expected attn_implementation sdpa, eager or flash_attention_2")
    return str(chosen)
