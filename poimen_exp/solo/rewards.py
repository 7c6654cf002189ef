"""Rewards of single-turn responses: providers, their weighted sum, and what a provider is told.

A reward that raises, or is no number, ends the run with the row that it was asked about: scored as 0, it would be
learnt from. Other providers come in through Python (``prompt_setup(..., reward=...)``), never by a name in a
configuration.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from poimen_exp.errors import Refused, RunFailed
from poimen_exp.gates.outcome import normalize_answer
from poimen_exp.gates.protocol import parse_answer
from poimen_exp.tracking.files import sha256_of
from poimen_exp.tracking.trajectories import RolloutRecord

_RESERVED = {"total", "less_kl"}
"""Names in a record's rewards that are not parts."""


@dataclass(frozen=True)
class RewardInput:
    """One response to score.

    Attributes:
        where: file and row of its prompt, for messages.
        messages: the prompt, as verl's ``prompt`` column has it.
        solution: the response's text without special tokens, as verl hands it to a reward function.
        response_tokens: sampled ids, the one that ended the response left out.
        data_source, ground_truth, extra_info: the row's columns, as verl names them.
    """

    where: str
    messages: Sequence[Mapping[str, str]]
    solution: str
    response_tokens: int
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]

    def sha256(self) -> str:
        """Of everything that a provider is told."""
        told = [list(self.messages), self.solution, self.response_tokens, self.data_source, self.ground_truth]
        text = json.dumps([*told, self.extra_info], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Reward:
    """A score, and the parts that it was made of."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)


class RewardProvider(Protocol):
    """Scores the responses of a step."""

    @property
    def identity(self) -> str:
        """What scores, with the hash of whatever file it is: recorded, and equal in every part of a run."""
        ...

    def check(self, row: RewardInput) -> str | None:
        """What the row lacks for this provider (``solution`` is empty); None where it can be scored."""
        ...

    def score(self, inputs: Sequence[RewardInput]) -> Sequence[Reward]:
        """One reward a response, in order."""
        ...


class RewardFailed(RunFailed):
    """A reward raised or is no number. ``records`` are the responses of the step, the failed one marked."""

    def __init__(self, message: str, place: int, records: tuple[RolloutRecord, ...] = ()) -> None:
        super().__init__(message)
        self.place, self.records = place, records


def checked_scores(provider: RewardProvider, inputs: Sequence[RewardInput]) -> tuple[Reward, ...]:
    """The provider's rewards.

    Raises:
        RewardFailed: it raised, gave another number of rewards than it was asked for, one that is not finite, or a part
            under a name of ours.
    """
    try:
        rewards = tuple(provider.score(inputs))
    except RewardFailed:
        raise
    except (Exception, SystemExit) as error:  # a provider is the user's code: what it raises is this run's failure
        raise RewardFailed(f"{provider.identity}: {type(error).__name__}: {error}", 0) from error
    if len(rewards) != len(inputs):
        raise RewardFailed(f"{provider.identity}: got {len(rewards)} rewards for {len(inputs)} responses", 0)
    for place, (reward, item) in enumerate(zip(rewards, inputs, strict=True)):
        taken = sorted(reward.parts.keys() & _RESERVED)
        if taken:
            raise RewardFailed(
                f"{item.where}: {provider.identity} gave a part named {taken[0]}, expected another name: the records "
                "have the score, and the reward less KL, under these",
                place,
            )
        for name, value in (("total", reward.total), *reward.parts.items()):
            if not math.isfinite(value):
                raise RewardFailed(
                    f"{item.where}: {provider.identity} gave {name}={value}, expected a finite number; the response: "
                    f"{item.solution[:80]!r}",
                    place,
                )
    return rewards


@dataclass(frozen=True)
class PerRow:
    """A provider made of a function of one response.

    Attributes:
        name: identity.
        function: response -> reward.
        lacks: what a row lacks for it.
    """

    name: str
    function: Callable[[RewardInput], float | Reward]
    lacks: Callable[[RewardInput], str | None] = lambda _: None

    @property
    def identity(self) -> str:
        return self.name

    def check(self, row: RewardInput) -> str | None:
        return self.lacks(row)

    def score(self, inputs: Sequence[RewardInput]) -> Sequence[Reward]:
        """Raises ``RewardFailed`` that names the row where the function raises."""
        out = []
        for place, item in enumerate(inputs):
            try:
                value = self.function(item)
                out.append(value if isinstance(value, Reward) else Reward(float(value)))
            except (Exception, SystemExit) as error:  # the user's code; its sys.exit(0) would end the run as done
                raise RewardFailed(
                    f"{item.where}: {self.name} raised {type(error).__name__}: {error}; the response: "
                    f"{item.solution[:80]!r}",
                    place,
                ) from error
        return out


@dataclass(frozen=True)
class Weighted:
    """The weighted sum of several providers, each a part under its name.

    An environment's verifier is a ``PerRow`` among them.
    """

    providers: Mapping[str, tuple[RewardProvider, float]]

    @property
    def identity(self) -> str:
        terms = (f"{weight!r} x {name}={provider.identity}" for name, (provider, weight) in self.providers.items())
        return f"weighted({', '.join(terms)})"

    def check(self, row: RewardInput) -> str | None:
        lacking = (provider.check(row) for provider, _ in self.providers.values())
        return next((reason for reason in lacking if reason), None)

    def score(self, inputs: Sequence[RewardInput]) -> Sequence[Reward]:
        """Every provider over the whole batch, one after another."""
        columns = {name: checked_scores(provider, inputs) for name, (provider, _) in self.providers.items()}
        out = []
        for place in range(len(inputs)):
            parts = {name: column[place].total for name, column in columns.items()}
            out.append(Reward(sum(self.providers[name][1] * value for name, value in parts.items()), parts))
        return out


def exact_answer() -> PerRow:
    """1 where the answer is one of ``reward_model.ground_truth`` after normalisation, else 0.

    The answer is the text in the last ``\\boxed{}`` where there is one, else the whole response. Normalisation is that
    of SQuAD's scorer: lower case, no punctuation, no articles, single spaces.
    """

    def score(item: RewardInput) -> float:
        accepted = item.ground_truth if isinstance(item.ground_truth, list) else [item.ground_truth]
        boxed = parse_answer(item.solution)
        answer = item.solution if boxed is None else boxed
        return float(normalize_answer(answer) in {normalize_answer(str(text)) for text in accepted})

    def lacks(row: RewardInput) -> str | None:
        accepted = row.ground_truth if isinstance(row.ground_truth, list) else [row.ground_truth]
        if accepted and all(text is not None and normalize_answer(str(text)) for text in accepted):
            return None
        return f"reward_model.ground_truth: got {row.ground_truth!r}, expected answers that silence does not match"

    return PerRow("exact_answer/1", score, lacks)


def target_length() -> PerRow:
    """1 at ``extra_info.target_length`` sampled tokens, falling to 0 at none and at twice as many.

    max(0, 1 - |n - target| / target); the token that ended the response is not counted.
    """

    def score(item: RewardInput) -> float:
        target = int(item.extra_info["target_length"])
        return max(0.0, 1.0 - abs(item.response_tokens - target) / target)

    def lacks(row: RewardInput) -> str | None:
        target = row.extra_info.get("target_length")
        if type(target) is int and target > 0:
            return None
        return f"extra_info.target_length: got {target!r}, expected a whole number above 0"

    return PerRow("target_length/1", score, lacks)


def verl_scorer() -> PerRow:
    """verl's own scorer of each ``data_source`` (``verl.utils.reward_score.default_compute_score``).

    A row lacks a scorer where verl, asked to score nothing, knows none or cannot import it.
    """
    from importlib.metadata import version

    from verl.utils.reward_score import default_compute_score

    @cache
    def unknown(source: str) -> str | None:
        try:
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                default_compute_score(data_source=source, solution_str="", ground_truth="")
        except (NotImplementedError, ImportError) as error:
            return f"data_source: got {source!r}, expected one that verl's scorer takes here: {error}"
        except Exception:  # it knows the source, and this is no answer of it
            return None
        return None

    scorer = _function(f"verl {version('verl')} default_compute_score", default_compute_score)
    return replace(scorer, lacks=lambda row: unknown(row.data_source))


def custom_function(path: Path, name: str) -> PerRow:
    """A function of the user's file with verl's signature: ``(data_source, solution_str, ground_truth, extra_info)``.

    It returns a number, or a mapping with ``score`` and further numbers, which are recorded as parts.

    Raises:
        Refused: the file does not load, or has no such function.
    """
    module_name = f"poimen_custom_reward_{sha256_of(path)[:16]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code
        raise Refused(f"reward.custom_reward_function.path={path}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise Refused(
            f"reward.custom_reward_function.name={name}: {path} has no plain function of that name; expected "
            f"def {name}(data_source, solution_str, ground_truth, extra_info)"
        )
    return _function(f"{name} of {path.name} sha256 {sha256_of(path)}", function)


def _function(name: str, function: Callable[..., Any]) -> PerRow:
    def score(item: RewardInput) -> Reward:
        result = function(
            data_source=item.data_source,
            solution_str=item.solution,
            ground_truth=item.ground_truth,
            extra_info=dict(item.extra_info),
        )
        if not isinstance(result, Mapping):
            return Reward(float(result))
        numbers = {str(key): float(value) for key, value in result.items() if isinstance(value, int | float)}
        return Reward(float(result["score"]), {key: value for key, value in numbers.items() if key != "score"})

    return PerRow(name, score)
