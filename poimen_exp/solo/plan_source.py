"""The configuration that ``poimen plan`` looks at: a file of verl's or of ours, or a packaged experiment."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from poimen_exp.config.compose import compose_config, override
from poimen_exp.config.keys import check_keys, flat, suggestion, unknown_paths
from poimen_exp.config.paths import experiments
from poimen_exp.config.schema import own_keys
from poimen_exp.config.tree import MISSING, verl_tree, walk
from poimen_exp.errors import Refused
from poimen_exp.wording import counted, meant

_ENGINE = "actor_rollout_ref.rollout.name"
FILL_IN = "fill_in"
"""Key of a template: dotted leaf -> what belongs there. A file that has it runs only once all of them are set."""


@dataclass(frozen=True)
class Source:
    """A configuration to plan.

    Attributes:
        name: the file, or ``+experiment=NAME``.
        cfg: verl's whole tree and our keys; what the source leaves out has its default.
        given: leaves that the source or an override sets.
        sha256: of the file; None for a packaged experiment.
    """

    name: str
    cfg: DictConfig
    given: frozenset[str]
    overrides: tuple[str, ...]
    sha256: str | None


def file_source(file: Path, overrides: Sequence[str] = ()) -> Source:
    """A resolved verl configuration, or one of ours (``resolved.yaml``), with overrides.

    What the file leaves out has verl's default, and our own keys have those of the root config.

    Raises:
        Refused: not a YAML mapping; a key that verl 0.9.1's tree lacks; an interpolation that does not resolve; a
            template with something left to fill in.
    """
    loaded = _load(file)
    wanted = _wanted(loaded, file)
    cfg = OmegaConf.merge(_base(), loaded)
    assert isinstance(cfg, DictConfig)
    for path in wanted:  # merging leaves a default in the place of ???
        if OmegaConf.is_missing(OmegaConf.select(loaded, path.rpartition(".")[0]) or {}, path.rpartition(".")[2]):
            OmegaConf.update(cfg, path, MISSING)
    _refuse_foreign(cfg, file)
    cfg = override(cfg, overrides)
    check_keys(cfg)
    _refuse_unresolved(cfg, file)
    _refuse_template(cfg, wanted, file)
    given = frozenset(flat(loaded)) | _overridden(overrides)
    return Source(str(file), cfg, given, tuple(overrides), hashlib.sha256(file.read_bytes()).hexdigest())


def example_source(name: str, overrides: Sequence[str] = ()) -> Source:
    """A packaged experiment as it composes.

    Raises:
        Refused: there is no such experiment; the message lists those that there are.
    """
    names = experiments()
    if name not in names:
        raise Refused(f"--example: got {name}, expected one of {', '.join(names)}{meant(name, names, '--example ')}")
    line = f"+experiment={name}"
    cfg = compose_config([line, *overrides])
    raw, defaults = flat(cfg), verl_tree().leaves
    given = frozenset(path for path, value in raw.items() if path not in defaults or defaults[path] != value)
    return Source(line, cfg, given, tuple(overrides), None)


def load_config(file: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration of ``file_source``."""
    return file_source(file, overrides).cfg


def _load(file: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(file)
    except FileNotFoundError:
        raise Refused(f"{file}: not found; expected a YAML file with a verl configuration") from None
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise Refused(f"{file}: not YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise Refused(f"{file}: got a list or a text, expected a mapping")
    return loaded


@lru_cache(maxsize=1)
def _base() -> DictConfig:
    """verl's defaults with our own keys beside them; the engine, which verl leaves open, as our root config has it.

    Made once, which takes a second; not to be changed.
    """
    base = OmegaConf.create()
    for path, default in verl_tree().leaves.items():
        OmegaConf.update(base, path, default, force_add=True)
    OmegaConf.update(base, _ENGINE, "vllm")
    ours = compose_config()
    for name in sorted({path.split(".")[0] for path in own_keys()}):
        base[name] = ours[name]
    return base


def _overridden(overrides: Sequence[str]) -> frozenset[str]:
    return frozenset(line.lstrip("+").partition("=")[0] for line in overrides)


def _refuse_foreign(cfg: DictConfig, file: Path) -> None:
    """Keys that the pinned tree lacks: a misspelling, or another verl's."""
    paths = unknown_paths(cfg)
    if paths:
        version = verl_tree().version
        lines = [f"{path}: not in verl {version}'s tree, and none of our keys{suggestion(path)}" for path in paths]
        head = f"{file}: {counted(len(paths), 'unknown key')}; expected a configuration of verl {version}"
        raise Refused("\n".join([head, *lines]))


def _refuse_unresolved(cfg: DictConfig, file: Path) -> None:
    lines = []
    for path, node in walk(cfg):
        if node is not None and node._is_interpolation():
            try:
                OmegaConf.select(cfg, path, throw_on_resolution_failure=True)
            except OmegaConfBaseException as error:
                cause = str(error).splitlines()[0]
                lines.append(f"{path}: got {node._value()}, expected a value or a key that exists: {cause}")
    if lines:
        raise Refused("\n".join([f"{file}: {counted(len(lines), 'unresolved interpolation')}", *lines]))


def _wanted(loaded: DictConfig, file: Path) -> dict[str, str]:
    """Takes a template's list of what is to be filled in out of ``loaded``."""
    listed = loaded.pop(FILL_IN, None)
    if listed is None:
        return {}
    if not isinstance(listed, DictConfig):
        raise Refused(f"{file}: {FILL_IN}: got {listed!r}, expected a mapping of leaves to what belongs there")
    return {str(path): str(hint) for path, hint in listed.items()}


def _refuse_template(cfg: DictConfig, wanted: dict[str, str], file: Path) -> None:
    values = flat(cfg)
    left = {path: hint for path, hint in wanted.items() if values.get(path, MISSING) == MISSING}
    if left:
        lines = [f"{path}: {hint}" for path, hint in left.items()]
        raise Refused(
            "\n".join([f"{file}: a template, which does not run: {counted(len(left), 'value')} to fill in", *lines])
        )
