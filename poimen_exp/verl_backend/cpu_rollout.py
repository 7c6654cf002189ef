"""verl's rollout on transformers in one Ray actor a replica: what vLLM's server is on a GPU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from poimen_exp.gates.types import Generation, Prompt, Sampling
from poimen_exp.solo.engine import Request, TransformersEngine
from poimen_exp.solo.policy import load_codec

_GATHER_S = 0.005
"""How long a batch waits for requests of other rollouts."""


class Server:
    """Samples for many rollouts at once; holds its own copy of the model, with the trainer's adapter on it.

    Args:
        path: model folder.
        seed: of the sampling.
        max_rows: rows in one batch (verl: ``max_num_seqs``).
        max_tokens: longest response where a request names none; one that names no stop ids has the model's own.
    """

    def __init__(self, path: str, seed: int, max_rows: int, max_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._stop_ids = load_codec(Path(path)).stop_ids
        self._generator = torch.Generator().manual_seed(seed)
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._version: int | None = None
        self._waiting: list[tuple[Request, tuple[int, ...], asyncio.Future[Generation]]] = []
        self._runs = False

    async def ready(self) -> bool:
        return True

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **unused: Any) -> TokenOutput:  # noqa: ARG002
        """The continuation of one prompt; requests that arrive together are sampled together."""
        sampling = Sampling(
            temperature=float(sampling_params["temperature"]),
            top_p=float(sampling_params["top_p"]),
            top_k=int(sampling_params["top_k"]),
            max_tokens=int(sampling_params.get("max_tokens", self._max_tokens)),
        )
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        request = Request(Prompt(tuple(prompt_ids), len(prompt_ids) - 1), sampling)
        self._waiting.append((request, tuple(sampling_params.get("stop_token_ids", self._stop_ids)), future))
        if not self._runs:
            self._runs = True
            self._task = asyncio.create_task(self._serve())
        generation = await future
        return TokenOutput(
            token_ids=list(generation.ids),
            log_probs=list(generation.log_probs),
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": self._version},
        )

    async def _serve(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(_GATHER_S)
                batch, self._waiting = self._waiting, []
                requests = [request for request, _, _ in batch]
                stop_ids = batch[0][1]  # one tokenizer, one set
                engine = TransformersEngine(self._model, stop_ids, stop_ids[0], self._max_rows)
                try:
                    done = await asyncio.to_thread(engine.generate, requests, self._generator)
                except Exception as error:  # whoever asked must hear of it
                    for _, _, future in batch:
                        future.set_exception(RuntimeError(f"sampling failed: {error!r}"))
                    continue
                for (_, _, future), generation in zip(batch, done, strict=True):
                    if not future.cancelled():
                        future.set_result(generation)
        finally:
            self._runs = False

    async def set_weights(
        self, named: list[tuple[str, Tensor]], peft_config: dict[str, Any] | None, version: int
    ) -> None:
        """The trainer's weights: an adapter where ``peft_config`` is given, else the model's own."""
        if peft_config is not None:
            self._set_adapter(dict(named), peft_config)
        else:
            wrong = self._model.load_state_dict(dict(named), strict=False).unexpected_keys
            if wrong:
                raise RuntimeError(f"weight sync: {len(wrong)} unknown names, the first is {wrong[0]}")
        self._version = version

    def _set_adapter(self, named: dict[str, Tensor], peft_config: dict[str, Any]) -> None:
        from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict

        if not isinstance(self._model, PeftModel):
            self._model = get_peft_model(self._model, LoraConfig(**peft_config)).eval()
        wrong = set_peft_model_state_dict(self._model, named).unexpected_keys
        if wrong:
            raise RuntimeError(f"adapter sync: {len(wrong)} unknown names, the first is {wrong[0]}")

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Sleeping, waking and profiling: there is no cache to free."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = nothing


def _server_name(replica: int) -> str:
    return f"poimen_transformers_{replica}"


class CpuReplica(RolloutReplica):  # type: ignore[misc]
    """Starts the server of a replica."""

    async def launch_servers(self) -> None:
        options = {"name": _server_name(self.replica_rank), "num_cpus": 0, "max_concurrency": 1000}
        server = (
            ray.remote(Server)
            .options(**options)
            .remote(
                str(self.model_config.path),
                self.config.seed + self.replica_rank,
                self.config.max_num_seqs,
                self.config.response_length,
            )
        )
        await server.ready.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"transformers://{self.replica_rank}"


class CpuRollout(BaseRollout):  # type: ignore[misc]
    """The trainer's end: hands weights to the server of its rank (one rank, one replica)."""

    sleep_level = 2

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
        **unused: Any,  # noqa: ARG002
    ) -> None:
        named = [(name, tensor.detach().cpu()) for name, tensor in weights]
        server = ray.get_actor(_server_name(int(os.environ["RANK"])))
        await server.set_weights.remote(named, peft_config if base_sync_done else None, global_steps)
