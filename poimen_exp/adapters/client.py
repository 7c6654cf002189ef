"""Requests to an OpenAI-compatible server, in token ids both ways."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poimen_exp.errors import Refused, RunFailed
from poimen_exp.gates.types import Sampling


@dataclass(frozen=True)
class Completion:
    """One answer of ``/v1/completions``.

    Attributes:
        model: name the server says it answered with.
        log_probs: of each id at temperature 1, before any filter (vLLM's ``raw_logprobs``).
        finished: a stop token came before the length limit; it is then the last id.
    """

    model: str
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finished: bool


@dataclass(frozen=True)
class ServedModel:
    """``parent`` is the base model's name for an adapter, None for the base model."""

    name: str
    parent: str | None


class Client:
    """Talks to the server at ``url`` (``http://host:port``, with or without ``/v1``).

    Raises:
        Refused: another kind of URL, or none.
    """

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise Refused(f"server {url!r}: expected http://host:port")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s

    def models(self) -> list[ServedModel]:
        """What the server serves."""
        return [ServedModel(card["id"], card.get("parent")) for card in self._request("/v1/models")["data"]]

    def served_adapter(self, name: str) -> ServedModel:
        """The adapter served under ``name``, its base model served too.

        Raises:
            RunFailed: it is not there, or it is a base model.
        """
        served = {model.name: model for model in self.models()}
        if name not in served:
            raise RunFailed(f"{self.url}: no model {name!r}; it serves {', '.join(sorted(served)) or 'none'}")
        if served[name].parent not in served:
            raise RunFailed(f"{self.url}: {name!r} is a base model there, expected an adapter (one with a parent)")
        return served[name]

    def complete(
        self, model: str, prompt: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], seed: int | None = None
    ) -> Completion:
        """Samples a continuation of ``prompt``."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # Servers fill what is left out from the model's generation_config.json: say all of it.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,  # only the protocol's own stop ids end a response
            "stop_token_ids": list(stop_ids),
            "skip_special_tokens": False,
        }
        if seed is not None:
            body["seed"] = seed
        answer = self._request("/v1/completions", body)
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        if ids is None:
            raise RunFailed(
                f"{self.url}: the answer has no token_ids; expected a vLLM server that knows return_token_ids "
                "(0.10.2 or newer)"
            )
        log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(log_probs) != len(ids):
            raise RunFailed(f"{self.url}: {len(ids)} token ids with {len(log_probs)} log-probs; expected one of each")
        return Completion(answer["model"], tuple(ids), tuple(log_probs), choice["finish_reason"] == "stop")

    def prompt_log_probs(self, model: str, prompt: Sequence[int]) -> tuple[str, tuple[float, ...]]:
        """Name of the model that answered, and the log-prob of each prompt token but the first."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self._request("/v1/completions", body)
        entries: list[Mapping[str, Any] | None] | None = answer["choices"][0].get("prompt_logprobs")
        if entries is None or len(entries) != len(prompt):
            raise RunFailed(f"{self.url}: the answer has no prompt_logprobs; expected a vLLM server")
        pairs = zip(prompt[1:], entries[1:], strict=True)
        return answer["model"], tuple(float((entry or {})[str(token)]["logprob"]) for token, entry in pairs)

    def tokenize(self, model: str, text: str) -> list[int]:
        """Token ids of ``text`` under the server's tokenizer."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._request("/tokenize", body)["tokens"]]

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise RunFailed(f"{self.url}{path}: status {error.code}, expected 200; {text}") from error
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise RunFailed(f"{self.url}{path}: no answer ({error}); is the server running there?") from error
        except ValueError as error:
            raise RunFailed(f"{self.url}{path}: the answer is not JSON ({error})") from error
