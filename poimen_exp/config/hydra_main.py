"""Hydra's command line with our checks in it.

``hydra.main`` prints every error and exits with 1, swallows what callbacks raise, and makes the run folder before the
task can refuse. This drives the same ``Hydra`` object (pinned: 1.3.8) and lets errors through.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from poimen_exp.config.compose import CONFIG_NAME, hydra_message
from poimen_exp.config.keys import check_keys, is_known, suggestion, unknown_key
from poimen_exp.config.paths import conf_dir
from poimen_exp.errors import PoimenError, Refused

Check = Callable[[DictConfig], object]
Task = Callable[[DictConfig], Any]


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader, refusing keys that nobody knows at every composition: a sweep's base and its jobs too.

    Attributes:
        composed: what the next composition gives, where it would compose again what was composed to be checked.
    """

    composed: DictConfig | None = None

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        if self.composed is not None:
            cfg, self.composed = self.composed, None
            return cfg
        parsed = OverridesParser.create(config_loader=self).parse_overrides(overrides)
        refuse_unknown(parsed, self)
        cfg = super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        if config_name is not None:
            check_keys(cfg)
            _check_swept(cfg, self)
        return cfg


def run(argv: Sequence[str], check: Check, task: Task) -> None:
    """Does what the command line says.

    Args:
        check: called with a single run's configuration before its folder exists; raises ``Refused``.
        task: called inside the run folder; in a sweep once for every trial.
    """
    parser = get_args_parser()
    args, unknown = parser.parse_known_intermixed_args(list(argv))  # flags may stand between overrides
    if unknown:
        raise Refused(
            f"{' '.join(unknown)}: no such flag; expected KEY=VALUE, as trainer.total_training_steps=5; --help lists "
            "the groups, --cfg job the keys, --hydra-help Hydra's flags"
        )
    if args.help:
        print(help_text())
        return
    _refuse_flags(args)
    hydra = _hydra(args)
    name = args.config_name or CONFIG_NAME
    try:
        if args.hydra_help:
            hydra.hydra_help(config_name=name, args_parser=parser, args=args)
        elif args.cfg:
            hydra.show_cfg(name, args.overrides, args.cfg, args.package, args.resolve)
        elif args.shell_completion:
            hydra.shell_completion(config_name=name, overrides=args.overrides)
        elif args.info is not None:
            hydra.show_info(args.info, config_name=name, overrides=args.overrides)
        else:
            _launch(hydra, args, name, check, task)
    finally:
        GlobalHydra.instance().clear()


_HELP = """Trains the update and exit gates of a recurrent-memory reader as a LoRA adapter.

  python -m poimen_exp +experiment=quickstart
  python -m poimen_exp +experiment=paper corpus.path=DIR actor_rollout_ref.model.path=DIR
  python -m poimen_exp --multirun +experiment=paper corpus.path=DIR actor_rollout_ref.model.path=DIR alpha=0.9,1.0

Groups:
{listed}

Any key that --cfg job shows can be set (KEY=VALUE); --hydra-help shows Hydra's own flags."""

_ADDED = ("experiment", "alpha_sweep")
"""Groups that are in no defaults list and are added with ``+``."""


def help_text() -> str:
    """What ``--help`` prints: nothing is composed for it."""
    folders = sorted(folder for folder in conf_dir().iterdir() if folder.is_dir() and any(folder.glob("*.yaml")))
    folders.sort(key=lambda folder: folder.name not in _ADDED)
    return _HELP.format(listed="\n".join(_choices(folder) for folder in folders))


def _choices(folder: Path) -> str:
    names = "|".join(sorted(path.stem for path in folder.glob("*.yaml")))
    return f"  {'+' if folder.name in _ADDED else ''}{folder.name}={names}"


def _refuse_flags(args: argparse.Namespace) -> None:
    if args.experimental_rerun is not None:
        raise Refused("--experimental-rerun: not offered; expected: poimen resume RUN")
    commands = (args.run, args.multirun, args.cfg is not None, args.shell_completion, args.info is not None)
    if sum(map(bool, commands)) > 1:
        raise Refused("expected one of --run, --multirun, --cfg, --info, --shell-completion")
    if args.resolve and args.cfg is None:
        raise Refused("--resolve: expected together with --cfg")


def _hydra(args: argparse.Namespace) -> Hydra:
    version.setbase("1.3")
    paths = create_config_search_path(args.config_path or f"file://{conf_dir()}")
    if args.config_dir is not None:
        _prepend(paths, args.config_dir)
    hydra = Hydra(task_name="poimen_exp", config_loader=CheckedLoader(paths))
    GlobalHydra.instance().initialize(hydra)
    return hydra


def _prepend(paths: ConfigSearchPath, folder: str) -> None:
    if not Path(folder).is_dir():
        raise Refused(f"--config-dir: got {folder}, expected a folder")
    paths.prepend("command-line", f"file://{Path(folder).absolute()}", SearchPathQuery(provider="schema"))


def _launch(hydra: Hydra, args: argparse.Namespace, name: str, check: Check, task: Task) -> None:
    """One run, or a sweep: with ``--multirun``, or where a file says ``hydra.mode: MULTIRUN`` (``+alpha_sweep``)."""
    if args.multirun:
        hydra.multirun(name, task, args.overrides)
        return
    cfg = hydra.compose_config(name, args.overrides, RunMode.RUN, validate_sweep_overrides=False)
    if cfg.hydra.mode == RunMode.MULTIRUN:
        hydra.multirun(name, task, args.overrides)
        return
    parsed = OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(args.overrides)
    swept = [override.key_or_group for override in parsed if override.is_sweep_override()]
    if swept:
        raise Refused(f"{', '.join(swept)}: several values, expected one, or --multirun to run each")
    check(without_hydra(cfg))
    said: list[PoimenError] = []

    def quiet(job: DictConfig) -> Any:
        """The task; of its own errors Hydra would print the overrides before they are told."""
        try:
            return task(job)
        except PoimenError as error:
            said.append(error)

    cast("CheckedLoader", hydra.config_loader).composed = cfg
    hydra.run(name, quiet, args.overrides)
    if said:
        raise said[0]


def without_hydra(cfg: DictConfig) -> DictConfig:
    """A copy as the task gets it."""
    job = cfg.copy()
    with open_dict(job):
        del job["hydra"]
    return job


def refuse_unknown(overrides: Sequence[Override], loader: ConfigLoaderImpl) -> None:
    """Refuses override keys that are neither keys nor groups; ``hydra.*`` is left to Hydra's own schema.

    Hydra itself would advise ``+key=value`` for a misspelt key, and take it.
    """
    lines = []
    for override in overrides:
        key = override.key_or_group
        if key == "hydra" or key.startswith(("hydra.", "hydra/")) or _is_group(key, loader):
            continue
        if not is_known(key):
            lines.append(unknown_key(key, f" ({override.input_line})") + _near_group(key))
    if lines:
        raise Refused("\n".join(lines))


def _is_group(key: str, loader: ConfigLoaderImpl) -> bool:
    return "/" in key or bool(loader.get_group_options(key))


def _near_group(key: str) -> str:
    groups = [folder.name for folder in conf_dir().iterdir() if folder.is_dir()]
    near = [] if suggestion(key) else difflib.get_close_matches(key, groups, n=1)
    return f"; did you mean the group {'+' if near[0] in _ADDED else ''}{near[0]}?" if near else ""


def _check_swept(cfg: DictConfig, loader: ConfigLoaderImpl) -> None:
    """Refuses unknown keys under ``hydra.sweeper.params``."""
    params = cfg.hydra.sweeper.get("params") or {}
    lines = [
        unknown_key(str(key), " (hydra.sweeper.params)")
        for key in params
        if not (is_known(str(key)) or _is_group(str(key), loader))
    ]
    if lines:
        raise Refused("\n".join(lines))


def explain(error: HydraException | OmegaConfBaseException) -> str:
    """What Hydra says, with the key that was meant where one of its own (``hydra.*``) is misspelt."""
    message = hydra_message(error)
    found = re.search(r"full_key: (hydra\.[\w.]+)", message)
    if found is None:
        return message
    parent, _, name = found[1].rpartition(".")
    siblings = OmegaConf.select(OmegaConf.create({"hydra": _hydra_defaults()}), parent) or {}
    near = difflib.get_close_matches(name, [str(key) for key in siblings], n=1)
    return f"{found[1]}: no such key" + (f"; did you mean {parent}.{near[0]}?" if near else "")


def _hydra_defaults() -> dict[str, Any]:
    """Hydra's own keys, with those of our sweeper."""
    from hydra.conf import HydraConf
    from hydra.core.config_store import ConfigStore

    sweeper = ConfigStore.instance().load("hydra/sweeper/poimen.yaml").node
    known: dict[str, Any] = {str(key): None for key in OmegaConf.structured(HydraConf)}
    for name in ("run", "sweep", "job", "runtime"):
        known[name] = dict.fromkeys(str(key) for key in OmegaConf.structured(HydraConf)[name])
    return {**known, "sweeper": dict.fromkeys(str(key) for key in sweeper)}
