"""vLLM as the rollout engine, in this process: the adapter is handed over after every update, under a new name."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from poimen_exp.adapters.vllm_env import NO_FLASHINFER
from poimen_exp.errors import Refused, RunFailed
from poimen_exp.gates.types import Generation, Sampling

if TYPE_CHECKING:
    from poimen_exp.solo.engine import Follow, Request

_RECORDING = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_specialize_lora": False}
"""Decoding steps are recorded whole and nothing is compiled: a start of seconds instead of minutes. Every row has the
adapter, so none is recorded without."""

SavePeft = Callable[[Path], None]
"""Writes the policy's adapter as a PEFT folder."""


@dataclass(frozen=True)
class VllmSettings:
    """What the engine is made with.

    Attributes:
        lora_rank: largest rank that vLLM makes room for; one of those it knows (``adapters.lora_config.vllm_rank``).
        max_length: prompt and response ids of the longest row.
        memory_share: of the device's memory, weights included (verl: rollout.gpu_memory_utilization).
        enforce_eager: no recording of decoding steps: starts some seconds sooner, writes slower.
    """

    model: Path
    dtype: Literal["float32", "bfloat16"]
    lora_rank: int
    max_rows: int
    max_length: int
    memory_share: float
    enforce_eager: bool
    seed: int


class VllmEngine:
    """Samples through vLLM's own scheduler: paged cache, prefix cache, rows that join and leave at every step.

    An adapter has a new name and a new id after every hand-over, and the prefix cache is emptied, so that nothing
    computed with old weights is read again. One LoRA slot more than adapters stays free: vLLM 0.24 gives base
    requests the adapter of the last slot.

    Args:
        samplings: every sampling that will be asked for; they decide which log-probs vLLM keeps.
        stop_ids: ids that end a response.
        save: writes the policy's adapter.
    """

    def __init__(
        self, settings: VllmSettings, samplings: Sequence[Sampling], stop_ids: Sequence[int], save: SavePeft
    ) -> None:
        self._stop, self._save, self._version, self._asked = list(stop_ids), save, 0, 0
        self._root = tempfile.TemporaryDirectory(prefix="poimen-adapter-")
        self._sleeps = torch.cuda.is_available()
        self._engine = _start(settings, log_probs_mode(samplings), self._sleeps)
        self._lora: Any = None
        self.sync()

    def sync(self) -> None:
        """Hands over the policy's adapter as it now is, and forgets every key and value."""
        from vllm.lora.request import LoRARequest

        self.wake()  # an adapter's place is among the weights, which a sleeping engine does not have
        self._version += 1
        folder = Path(self._root.name, f"v{self._version}")
        self._save(folder)
        if self._lora is not None:
            self._engine.remove_lora(self._lora.lora_int_id)
            shutil.rmtree(self._lora.lora_path)
        self._lora = LoRARequest(f"v{self._version}", self._version, str(folder))
        self._engine.add_lora(self._lora)
        if not self._engine.reset_prefix_cache():
            raise RunFailed("vLLM kept its prefix cache: rows are still being written while the adapter changes")

    def sleep(self) -> None:
        """Frees the cache and moves the weights to the host while others need the device."""
        if self._sleeps and not self._engine.is_sleeping():
            self._engine.sleep(level=1)

    def wake(self) -> None:
        """Takes back what ``sleep`` gave up."""
        if self._sleeps and self._engine.is_sleeping():
            self._engine.wake_up()

    def generate(self, requests: Sequence[Request], generator: torch.Generator) -> list[Generation]:
        """Continues every prompt; results in the order of ``requests``."""
        out: dict[int, Generation] = {}

        def keep(key: int, generation: Generation) -> None:
            out[key] = generation

        self.serve(dict(enumerate(requests)), keep, generator)
        return [out[key] for key in range(len(requests))]

    def serve(self, requests: Mapping[int, Request], follow: Follow, generator: torch.Generator) -> None:
        """Continues prompts until nobody asks any more; vLLM takes new ones into the batch at once.

        Args:
            generator: seeds the process's own generators, which vLLM draws from: the same state and the same
                requests give the same ids.
        """
        self.wake()
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
        owner: dict[str, int] = {}
        for key, request in requests.items():
            owner[self._add(request)] = key
        while owner:
            for output in self._engine.step():
                if not output.finished:
                    continue
                key = owner.pop(output.request_id)
                following = follow(key, _generation(output.outputs[0]))
                if following is not None:
                    owner[self._add(following)] = key

    def _add(self, request: Request) -> str:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._asked += 1
        name, sampling = str(self._asked), request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop_token_ids=self._stop,
            ignore_eos=True,  # the ids above end a response, and no other
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt.ids))
        self._engine.add_request(name, prompt, params, lora_request=self._lora)
        return name


def log_probs_mode(samplings: Sequence[Sampling]) -> Literal["raw_logprobs", "processed_logprobs"]:
    """Which of vLLM's log-probs are those of the sampling temperature before top-p and top-k.

    Raises:
        Refused: a temperature other than 1 together with top-p or top-k: vLLM keeps no such log-probs.
    """
    if all(sampling.temperature in (0.0, 1.0) for sampling in samplings):
        return "raw_logprobs"
    if all(sampling.top_p == 1.0 and sampling.top_k <= 0 and sampling.temperature > 0 for sampling in samplings):
        return "processed_logprobs"
    raise Refused(
        "actor_rollout_ref.rollout: with vLLM in this process expected temperature 1 (or 0 in val_kwargs), or no top_p "
        "and no top_k at all: its log-probs are either those of temperature 1 or those after every filter"
    )


def _generation(output: Any) -> Generation:
    ids = tuple(output.token_ids)
    log_probs = tuple(entry[token].logprob for entry, token in zip(output.logprobs, ids, strict=True))
    return Generation(ids, log_probs, output.finish_reason == "length")


def _start(settings: VllmSettings, mode: str, sleeps: bool) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: its memory and its generators are ours
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault(*NO_FLASHINFER)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(settings.model),
            dtype=settings.dtype,
            max_model_len=settings.max_length,
            max_num_seqs=settings.max_rows,
            gpu_memory_utilization=settings.memory_share,
            enforce_eager=settings.enforce_eager,
            compilation_config=dict(_RECORDING),
            enable_prefix_caching=True,
            enable_lora=True,
            max_loras=2,
            max_cpu_loras=2,
            max_lora_rank=settings.lora_rank,
            enable_sleep_mode=sleeps,
            logprobs_mode=mode,
            generation_config="vllm",
            disable_log_stats=True,
            seed=settings.seed % 2**32,
        )
    )
