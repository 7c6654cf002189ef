"""The core's ``generate`` on verl's sampling servers."""

from __future__ import annotations

import asyncio
from typing import Any

from poimen_exp.gates.types import Generation, Prompt, Sampling


class ServerGenerate:
    """The core's ``generate`` on verl's servers.

    Args:
        client: verl's client.
        group: uid of the prompt: verl keeps requests of one id on one server, so the rollouts of a group find the
            chunk that they share in its prefix cache.
        stop_ids: ids that end a response.
        timeout_s: longest wait for one turn.
        own_ids: every call gets its own request id instead (verl's ``full_determinism`` hands ids on to vLLM, where
            they must differ).
    """

    def __init__(
        self, client: Any, group: str, stop_ids: tuple[int, ...], timeout_s: float, own_ids: str | None
    ) -> None:
        self._client, self._group, self._stop_ids = client, group, stop_ids
        self._timeout_s, self._own_ids = timeout_s, own_ids
        self.fields: list[dict[str, Any]] = []
        """What the server said of each turn beside its tokens (the version of its weights)."""

    async def __call__(self, prompt: Prompt, sampling: Sampling) -> Generation:
        request = self._group if self._own_ids is None else f"{self._own_ids}-{len(self.fields)}"
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": 1.0,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(self._stop_ids),
            "logprobs": True,
        }
        call = self._client.generate(request_id=request, prompt_ids=list(prompt.ids), sampling_params=params)
        output = await asyncio.wait_for(call, self._timeout_s)
        ids = tuple(int(token) for token in output.token_ids)
        log_probs = tuple(float(value) for value in output.log_probs or ())
        if not ids or len(ids) != len(log_probs) or output.stop_reason in ("abort", "aborted"):
            raise RuntimeError(
                f"the server returned {len(ids)} tokens and {len(log_probs)} log-probs (stop reason "
                f"{output.stop_reason}); expected at least one token and a log-prob for each"
            )
        self.fields.append(dict(output.extra_fields))
        return Generation(ids, log_probs, clipped=ids[-1] not in self._stop_ids)
