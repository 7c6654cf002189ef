"""What a run would read and cost, found out without a step: for ``poimen plan`` and the start of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from poimen_exp.solo.estimate import Estimate, lines
from poimen_exp.solo.estimate_inputs import measure_rates, run_estimate
from poimen_exp.solo.policy import pick_device
from poimen_exp.solo.settings import SoloSettings
from poimen_exp.solo.setup import Setup, gate_setup, require_full_batch
from poimen_exp.tracking.provenance import describe_device

if TYPE_CHECKING:
    from omegaconf import DictConfig


def loaded_setup(settings: SoloSettings) -> Setup:
    """Tokenizer, tasks and rewards of a run.

    Raises:
        Refused: what a run would be refused for, fewer training tasks than a batch included.
    """
    setup: Setup
    if settings.prompts is not None:
        from poimen_exp.solo.prompt_setup import prompt_setup

        setup = prompt_setup(settings)
    else:
        setup = gate_setup(settings.model, settings.gates, settings.corpus, settings.rollout.max_prompt_length)
    require_full_batch(settings, setup.train_size)
    return setup


def checked_setup(cfg: DictConfig) -> tuple[SoloSettings, Setup]:
    """Everything that a run of ``cfg`` is checked for before its first step, the gate check included."""
    from poimen_exp import app

    solo = app.check(cfg).solo
    assert solo is not None  # the caller planned it for one device
    return solo.settings, solo.setup


@dataclass(frozen=True)
class Cost:
    """The estimate of a run on this machine, as ``plan.json`` has it and as it is printed.

    ``settings``: of the run, offloading where the machine's memory asks for it.
    """

    settings: SoloSettings
    estimate: dict[str, Any]
    told: list[str]


def cost(settings: SoloSettings, setup: Setup, done: int = 0) -> Cost:
    """What a run will cost on this machine; without the ``done`` steps that lie behind it."""
    device = pick_device(settings.device)
    found: Estimate = run_estimate(settings, setup, measure_rates(device, settings.model.dtype), device, done)
    told = lines(found, settings.trainer.total_training_steps, describe_device(str(device)), done)
    if found.offload != settings.offload:
        told.append("offload: all roles, as memory asks for it: the peak would be above what this GPU has")
    return Cost(replace(settings, offload=found.offload), asdict(found), told)
