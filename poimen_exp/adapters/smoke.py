"""The smoke test of a running server: does the named adapter answer, does it change anything, does it leak?"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from poimen_exp.adapters.client import Client
from poimen_exp.adapters.probe import PROBE_TEXT
from poimen_exp.errors import RunFailed
from poimen_exp.gates.types import Sampling

SMALLEST_EFFECT = 1e-4
"""In nats. Above what batching moves float32 log-probs by (1e-5); in bfloat16 an adapter's effect is far larger."""
_AT_ONCE = 4


@dataclass(frozen=True)
class SmokeReport:
    """What the server answered.

    Attributes:
        effect: largest absolute difference between base and adapter over the prompt's log-probs, in nats.
        leaks: base requests sent together with the adapter's came back with the adapter's log-probs.
    """

    base: str
    adapter: str
    completion_tokens: int
    effect: float
    leaks: bool


def smoke(url: str, name: str) -> SmokeReport:
    """Asks base and adapter for a completion each, and for the log-probs of one prompt: apart, then together.

    Raises:
        RunFailed: no server, no such model there, a status other than 200, another model answered, no effect.
    """
    client = Client(url)
    base = str(client.served_adapter(name).parent)
    prompt = client.tokenize(base, PROBE_TEXT)
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8)
    completions = {model: client.complete(model, prompt, greedy, stop_ids=()) for model in (base, name)}
    for model, completion in completions.items():
        _require_named(url, model, completion.model)
    plain, adapted = _log_probs(client, base, prompt), _log_probs(client, name, prompt)
    effect = _distance(plain, adapted)
    if not effect > SMALLEST_EFFECT:
        raise RunFailed(
            f"{url}: {name} gives the log-probs of {base} (largest difference {effect:.3g} nats, expected more than "
            f"{SMALLEST_EFFECT:g}); the adapter has no effect there"
        )
    leaks = _leaks(client, base, name, prompt, plain, adapted)
    return SmokeReport(base, name, len(completions[name].ids), effect, leaks)


def _require_named(url: str, asked: str, answered: str) -> None:
    if asked != answered:
        raise RunFailed(f"{url}: asked {asked}, {answered} answered")


def _log_probs(client: Client, model: str, prompt: Sequence[int]) -> tuple[float, ...]:
    answered, log_probs = client.prompt_log_probs(model, prompt)
    _require_named(client.url, model, answered)
    return log_probs


def _leaks(
    client: Client, base: str, name: str, prompt: Sequence[int], plain: Sequence[float], adapted: Sequence[float]
) -> bool:
    """Whether any base request, sent while adapter requests run, is nearer to the adapter than to the base."""
    models = [base, name] * _AT_ONCE
    with ThreadPoolExecutor(len(models)) as pool:
        together = list(pool.map(lambda model: _log_probs(client, model, prompt), models))
    return any(_distance(found, adapted) < _distance(found, plain) for found in together[::2])


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)
