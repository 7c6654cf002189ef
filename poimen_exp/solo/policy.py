"""The policy: a frozen base model, a float32 LoRA adapter, and a merged copy that samples."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poimen_exp.errors import Refused
from poimen_exp.gates.codec import HfCodec
from poimen_exp.solo.fused import use_fused_lora, use_fused_norms
from poimen_exp.solo.offload import model_on_device
from poimen_exp.solo.settings import ModelSettings
from poimen_exp.solo.slots import never_attend_with_cudnn, use_grouped_attention

ADAPTER = "default"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of ``malloc.h``."""


def pick_device(wanted: str) -> torch.device:
    """``auto`` is the GPU if there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise Refused("device: got cuda, but torch sees no GPU; use device=auto or device=cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted, 0) if wanted == "cuda" else torch.device(wanted)


def keep_freed_memory() -> None:
    """Lets glibc keep up to 1 GiB that was freed: the kernel clearing it anew takes a tenth of a step on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # glibc takes no more
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def load_codec(path: Path) -> HfCodec:
    """The model folder's tokenizer; ids that end a response come from its generation config too."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not tokenizer.is_fast:
        raise Refused(f"{path}: got a tokenizer without a tokenizer.json, expected a fast one; convert it first")
    if tokenizer.chat_template is None:
        raise Refused(f"{path}: the tokenizer has no chat template; expected an instruct model")
    ends = {tokenizer.eos_token_id}
    if (path / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        ends |= set(eos if isinstance(eos, list) else [eos])
    stop_ids = tuple(sorted(int(end) for end in ends if end is not None))
    if not stop_ids:
        raise Refused(f"{path}: neither tokenizer nor generation config names an end-of-sequence token")
    return HfCodec(tokenizer, stop_ids)


class Policy:
    """Trainable adapter over a frozen base, and ``sampler``, a copy of the base with the adapter merged in.

    LoRA weights are float32 whatever the base's type is: at lr 1e-6 a bfloat16 weight does not move. The sampler is
    only as fresh as the last ``sync``.

    Args:
        offload: both lie in main memory; ``on_device`` brings the trained one, whoever samples brings the sampler.
    """

    def __init__(self, settings: ModelSettings, device: torch.device, offload: bool = False) -> None:
        from peft import LoraConfig, PeftModel, get_peft_model
        from transformers import AutoModelForCausalLM

        self.device, self._offload = device, offload
        self.dtype = getattr(torch, settings.dtype)
        base = AutoModelForCausalLM.from_pretrained(
            settings.path,
            dtype=self.dtype,
            attn_implementation=settings.attn_implementation,
            local_files_only=True,
        )
        base.to("cpu" if offload else device).eval().requires_grad_(False)
        never_attend_with_cudnn()
        if settings.attn_implementation == "sdpa":
            use_grouped_attention(base)  # the same products; transformers' own repeats each shared key for every head
        if self.dtype != torch.float32:
            use_fused_norms(base)
        self.sampler = copy.deepcopy(base)
        if settings.adapter is not None:
            self.model: Any = PeftModel.from_pretrained(base, settings.adapter, is_trainable=True)
        else:
            targets = settings.target_modules
            config = LoraConfig(
                task_type="CAUSAL_LM",
                r=settings.lora_rank,
                lora_alpha=settings.lora_alpha,
                lora_dropout=0.0,
                target_modules=targets if isinstance(targets, str) else list(targets),
                base_model_name_or_path=str(settings.path),
            )
            self.model = get_peft_model(base, config)
        if self.dtype != torch.float32:
            use_fused_lora(self.model, ADAPTER)
        self.model.eval()  # no dropout anywhere: old and new log-probs must be of one distribution
        for parameter in self.trainable().values():
            parameter.data = parameter.data.float()
        if not self.trainable():
            raise Refused(f"{settings.target_modules}: no module of {settings.path} has that name: nothing to train")
        with self.on_device():
            self.sync()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A phase that needs the trained model: forwards, updates, ``sync``."""
        with model_on_device(self.model, self.device, self._offload):
            yield

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that the optimizer moves, by name."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """Copy of the trainable weights."""
        return frozen_state(self.trainable())

    def base_state(self) -> dict[str, Tensor]:
        """Adapter weights under which the model is its frozen base: every B is 0."""
        return {name: torch.zeros_like(value) if "lora_B" in name else value for name, value in self.state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Puts trainable weights back; names must match exactly."""
        put_weights(self.trainable(), state, "adapter")

    @contextmanager
    def using(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with other adapter weights for a while (the KL reference)."""
        mine = self.state()
        self.load_state(state)
        try:
            yield
        finally:
            self.load_state(mine)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Forward passes in the base's type."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            yield

    @torch.no_grad()
    def sync(self) -> float:
        """Merges the adapter into the sampler; returns the largest change of any weight of the base."""
        from peft.tuners.lora import LoraLayer

        largest = 0.0
        for name, module in self.model.base_model.model.named_modules():
            if isinstance(module, LoraLayer):
                weight: Tensor = module.get_base_layer().weight
                merged = (weight.float() + module.get_delta_weight(ADAPTER).float()).to(weight.dtype)
                largest = max(largest, float((merged - weight).abs().max()))
                self.sampler.get_submodule(name).weight.copy_(merged)
        return largest


def put_weights(mine: Mapping[str, torch.nn.Parameter], state: Mapping[str, Tensor], what: str) -> None:
    """Copies ``state`` into the parameters of those names, which must match exactly; ``what`` is for the message."""
    if mine.keys() != state.keys():
        raise Refused(f"{what} weights do not fit: names differ in {sorted(mine.keys() ^ state.keys())[:4]}")
    with torch.no_grad():
        for name, value in state.items():
            mine[name].copy_(value)


def frozen_state(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """A copy of these weights that nothing trains."""
    return {name: value.detach().clone() for name, value in parameters.items()}
