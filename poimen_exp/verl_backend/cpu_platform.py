"""verl on a CPU: its own FSDP2 engine over gloo, and a transformers rollout. For tests and dry runs, not for speed.

verl 0.9.1 has no CPU platform. ``launch`` names this module in ``VERL_USE_EXTERNAL_MODULES`` when
``trainer.device=cpu``, and every process that imports verl then loads it. Nothing here is used on a GPU.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import verl.utils.distributed as verl_distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutReplicaRegistry

ROLLOUT = "transformers"
"""``actor_rollout_ref.rollout.name`` of the CPU rollout."""

_CPU = torch.device("cpu")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: False,
    "device_count": lambda: 1,
    "current_device": lambda: _CPU,
    "set_device": lambda *_: None,
    "synchronize": lambda *_: None,
    "empty_cache": lambda: None,
    "manual_seed": lambda *_: None,
    "manual_seed_all": lambda *_: None,
    "memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "max_memory_reserved": lambda *_: 0,
    "reset_peak_memory_stats": lambda *_: None,
    "mem_get_info": lambda *_: (0, 1),
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
    "get_device_name": lambda *_: "CPU",
}


def _device_module() -> types.ModuleType:
    """What verl expects of ``torch.cuda``."""
    module = types.ModuleType("torch_cpu")
    for name, function in _FUNCTIONS.items():
        setattr(module, name, function)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """A platform without an accelerator. Ray places workers by a made-up GPU resource (``ray_init.num_gpus``)."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return _CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:  # noqa: ARG002
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # noqa: ARG002
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _install() -> None:
    set_platform(CpuPlatform())
    # verl asks torch for "cpu:gloo,<device>:<backend>", which is a duplicate here and refused.
    original = verl_distributed.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend or "cpu:gloo")

    verl_distributed.initialize_global_process_group_ray = initialize
    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    # Both registries go by name, so that a process that never samples does not import the rollout.
    rollout_base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = "poimen_exp.verl_backend.cpu_rollout.CpuRollout"
    RolloutReplicaRegistry.register(ROLLOUT, _replica)


def _replica() -> type:
    from poimen_exp.verl_backend.cpu_rollout import CpuReplica

    return CpuReplica


_install()
