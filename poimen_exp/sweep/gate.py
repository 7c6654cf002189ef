"""The checks in front of a sweep. No configuration key reaches this module."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from omegaconf import DictConfig

from poimen_exp.errors import Refused


def check_before_sweep(configs: Sequence[DictConfig]) -> None:
    """Returns if every config may be trained; nothing of the sweep exists yet.

    Args:
        configs: composed configs, the first trial's first, then one for each further swept value. Those that differ in
            nothing the gate check reads (as in alpha or seed) share one check.

    Raises:
        Refused: with what failed and its numbers; a failed gate check leaves its report under ``multirun/refused/``.
    """
    from poimen_exp import app
    from poimen_exp.config.hydra_main import without_hydra

    distinct: dict[Hashable, DictConfig] = {}
    for position, config in enumerate(map(without_hydra, configs)):
        _require_objective(config)
        distinct.setdefault(_what_is_checked(config, position), config)
    # The first one last: the first trial, which asks again, finds the answer kept.
    for config in reversed(distinct.values()):
        app.check(config)


def _require_objective(config: DictConfig) -> None:
    """A trial that never validates has no value; its sweep would fail trial after trial, each trained in vain."""
    every = int(config.trainer.test_freq)
    if every < 1:
        raise Refused(
            f"trainer.test_freq: got {every}, expected 1 or more: a sweep compares its trials' best val/reward/total"
        )


def _what_is_checked(config: DictConfig, position: int) -> Hashable:
    """Equal for configs that one check speaks for. Compiling refuses a swept value that no run accepts."""
    if config.backend != "solo":
        return position
    from poimen_exp.solo.plan import compile_settings

    settings, _ = compile_settings(config)
    return repr((settings.corpus, settings.gates, settings.model, settings.rollout, settings.loss))
