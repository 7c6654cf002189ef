"""Which engine samples: vLLM in this process where it is asked for and can be, else the transformers engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import torch

from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.types import Generation
from poimen_exp.solo.engine import Follow, Request, TransformersEngine
from poimen_exp.solo.offload import model_on_device
from poimen_exp.solo.policy import Policy
from poimen_exp.solo.settings import SoloSettings


class Engine(Protocol):
    """Samples with the policy's weights as of the last ``sync``."""

    def generate(self, requests: Sequence[Request], generator: torch.Generator) -> list[Generation]:
        """Continues every prompt; results in the order of ``requests``."""
        ...

    def serve(self, requests: Mapping[int, Request], follow: Follow, generator: torch.Generator) -> None:
        """Continues prompts until nobody asks any more."""
        ...

    def sync(self) -> None:
        """Takes the policy's weights as they now are."""
        ...

    def sleep(self) -> None:
        """Gives up the device's memory until somebody asks again."""
        ...


class VisitingEngine:
    """A transformers engine that is made for a call: sampler, slots and what was recorded leave the device after it.

    Args:
        make: of an engine over ``sampler``.
    """

    def __init__(self, sampler: torch.nn.Module, device: torch.device, make: Callable[[], TransformersEngine]) -> None:
        make()  # refuses what cannot be sampled from
        self._sampler, self._device, self._make = sampler, device, make

    def generate(self, requests: Sequence[Request], generator: torch.Generator) -> list[Generation]:
        with model_on_device(self._sampler, self._device, moves=True):
            return self._make().generate(requests, generator)

    def serve(self, requests: Mapping[int, Request], follow: Follow, generator: torch.Generator) -> None:
        with model_on_device(self._sampler, self._device, moves=True):
            self._make().serve(requests, follow, generator)

    def sync(self) -> None:
        """Nothing to do: the sampler's weights are the policy's own copy."""

    def sleep(self) -> None:
        """Nothing to do: between calls nothing is on the device."""


def make_engine(settings: SoloSettings, policy: Policy, codec: HfCodec, say: Callable[[str], None]) -> Engine:
    """The run's engine; says which one it is where a GPU has no vLLM that was asked for.

    Raises:
        Refused: a sampling of which vLLM keeps no log-probs.
    """
    rollout = settings.rollout
    if rollout.engine == "vllm" and policy.device.type == "cuda":
        reason = _why_not_vllm(settings)
        if reason is None:
            return _vllm(settings, policy, codec)
        say(f"rollouts by the transformers engine: {reason}")
    make = partial(TransformersEngine, policy.sampler, codec.stop_ids, codec.pad_id, rollout.max_rows)
    return VisitingEngine(policy.sampler, policy.device, make) if settings.offload.actor else make()


def samples_with_vllm(settings: SoloSettings, device: torch.device) -> bool:
    """Whether vLLM was asked for, on a GPU, where it is installed and can have the adapter."""
    return settings.rollout.engine == "vllm" and device.type == "cuda" and _why_not_vllm(settings) is None


def _why_not_vllm(settings: SoloSettings) -> str | None:
    if find_spec("vllm") is None:
        return "the package vllm is not installed (extra vllm)"
    if settings.model.dtype != "bfloat16":
        return f"on a GPU vLLM's LoRA kernels take bfloat16, and the model is {settings.model.dtype}"
    return None


def _vllm(settings: SoloSettings, policy: Policy, codec: HfCodec) -> Engine:
    from poimen_exp.adapters.lora_config import vllm_rank
    from poimen_exp.solo.vllm_engine import VllmEngine, VllmSettings

    rollout, model = settings.rollout, settings.model
    return VllmEngine(
        VllmSettings(
            model=model.path,
            dtype=model.dtype,
            lora_rank=vllm_rank(model.lora_rank),
            max_rows=rollout.max_rows,
            max_length=rollout.max_prompt_length + max(rollout.train.max_tokens, rollout.val.max_tokens),
            memory_share=rollout.memory_share,
            enforce_eager=rollout.enforce_eager,
            seed=settings.seed,
        ),
        [rollout.train, rollout.val],
        codec.stop_ids,
        policy.model.save_pretrained,
    )
