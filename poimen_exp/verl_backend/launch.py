"""Ray for one run: started with verl's settings, ended with the run, whatever ends it."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from poimen_exp.adapters.vllm_env import NO_FLASHINFER
from poimen_exp.errors import RunFailed
from poimen_exp.wording import NO_PROGRESS_BARS

if TYPE_CHECKING:
    from omegaconf import DictConfig

_CPU_PLUGIN = "poimen_exp.verl_backend.cpu_platform"
_STARTS = 3


def prepare_environment(device: str) -> None:
    """Sets what verl reads of the environment when it is imported; Ray hands it to the workers of this host."""
    os.environ["TRANSFER_QUEUE_ENABLE"] = "1"
    os.environ.setdefault(*NO_FLASHINFER)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are folders: no process may wait for the network
    if "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a session of this process alone, on the loopback device
    # Ray would start some workers early, but without this run's variables: no actor of it could use them.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # verl tells of every engine that is not installed; one is enough.
    warnings.filterwarnings("ignore", message=".* engine is not available", category=UserWarning)
    if device == "cpu":
        # verl reads the name when it is first imported; where that has happened (the gate check), the import does it.
        _name_plugin(_CPU_PLUGIN)
        importlib.import_module("verl")
        importlib.import_module(_CPU_PLUGIN)
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # it kills workers on hosts that others fill
        os.environ.setdefault("RAY_worker_niceness", "0")  # workers at 15 stand still beside any other process


def _name_plugin(module: str) -> None:
    named = [name for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
    if module not in named:
        os.environ["VERL_USE_EXTERNAL_MODULES"] = ",".join([*named, module])


@contextmanager
def ray_for(config: DictConfig) -> Iterator[None]:
    """A Ray session with TransferQueue, as verl's ``run_ppo`` makes them. A cluster named by ``RAY_ADDRESS`` is joined.

    The trainer runs in this process and not in an actor, as ``run_ppo`` has it: its record, its errors and Ctrl-C are
    then the run's own. Workers get the variables that verl reads when it is imported, on other hosts too.
    """
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    defaults = get_ppo_ray_runtime_env(config)
    ours = ("TRANSFER_QUEUE_ENABLE", "HF_HUB_OFFLINE", "VERL_USE_EXTERNAL_MODULES")
    for name in (*ours, NO_FLASHINFER[0], NO_PROGRESS_BARS[0]):
        if name in os.environ:
            defaults["env_vars"][name] = os.environ[name]
    given = config.ray_kwargs.ray_init
    kwargs: dict[str, Any] = {str(name): value for name, value in given.items()}
    kwargs["runtime_env"] = OmegaConf.to_container(OmegaConf.merge(defaults, given.runtime_env))
    if "RAY_ADDRESS" in os.environ:  # resources are the cluster's
        kwargs = {name: value for name, value in kwargs.items() if name not in ("num_cpus", "num_gpus")}
    _start(kwargs)
    try:
        tq.init(config.transfer_queue)
        try:
            yield
        finally:
            tq.close()
    finally:
        ray.shutdown()


def _start(kwargs: dict[str, Any]) -> None:
    """``ray.init``, again where its helpers were too slow: they get 15 s, a constant, and a loaded host needs more."""
    import ray

    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(**kwargs)
            return
        except Exception as error:  # Ray raises the base class itself
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == _STARTS:
                raise RunFailed(f"Ray did not start (attempt {attempt} of {_STARTS}): {error}") from error
