"""verl's actor worker, with a weight sync that refuses to send nothing, and a known adapter to check it by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from poimen_exp.solo.slots import never_attend_with_cudnn
from poimen_exp.verl_backend.log_probs import use_log_probs_in_one_pass
from poimen_exp.verl_backend.sync_check import not_empty

PROBE_STD = 0.05
"""Size of the known ``lora_B`` weights: far above what bfloat16 sampling blurs, whatever the model."""


class GateWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """Runs on every rank."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        """verl's, then the guard around what its weight sync reads."""
        never_attend_with_cudnn()
        use_log_probs_in_one_pass()
        super().init_model()
        engine = self.actor.engine
        read = engine.get_per_tensor_param

        def guarded(*args: Any, **kwargs: Any) -> tuple[Iterable[tuple[str, Tensor]], Any]:
            named, peft_config = read(*args, **kwargs)
            lora = peft_config is not None and kwargs.get("base_sync_done", False)
            return not_empty(named, lora), peft_config

        engine.get_per_tensor_param = guarded
        self._kept: dict[str, Tensor] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def set_probe_adapter(self, seed: int) -> int:
        """Puts known numbers into every ``lora_B`` (zero in a fresh adapter, which no check could see).

        Returns:
            Tensors changed; ``drop_probe_adapter`` brings the old ones back.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, local in self._lora_b():
                self._kept[name] = local.clone()
                local.copy_(torch.randn(local.shape, generator=generator) * PROBE_STD)
        return len(self._kept)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def drop_probe_adapter(self) -> None:
        """Restores the weights that ``set_probe_adapter`` replaced, bit for bit."""
        with torch.no_grad():
            for name, local in self._lora_b():
                local.copy_(self._kept.pop(name))

    def _lora_b(self) -> list[tuple[str, Tensor]]:
        """This rank's part of every ``lora_B``, sharing memory with the parameter."""
        found = []
        for name, parameter in self.actor.engine.module.named_parameters():
            if ".lora_B." in name:
                found.append((name, parameter.to_local() if hasattr(parameter, "to_local") else parameter))
        return found
