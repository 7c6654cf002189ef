"""Where configuration files lie, found without importing what they belong to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from omegaconf import OmegaConf

from poimen_exp.errors import Refused

_PACKAGE = Path(__file__).resolve().parent.parent


def conf_dir() -> Path:
    """The folder of our Hydra groups: inside the package in a wheel, beside it in a checkout."""
    for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise Refused(
        f"conf/config.yaml: not found beside or inside {_PACKAGE}; expected the checkout's conf/ or the wheel's "
        "poimen_exp/conf/: install the package again"
    )


def experiments() -> list[str]:
    """Names of the packaged experiments, in alphabetical order."""
    return sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


def verl_config_dir() -> Path:
    """The folder ``verl/trainer/config``. verl is not imported: that takes eight seconds."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise Refused("verl: not installed; expected verl 0.9.1, whose configuration ours is built on: uv sync")
    return Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"


def asset(relative: str) -> str:
    """Absolute path of a file or folder that ships with the package."""
    return str(_PACKAGE / "assets" / relative)


def register_resolvers() -> None:
    """Makes ``${poimen_asset:quickstart/model}`` known to OmegaConf."""
    OmegaConf.register_new_resolver("poimen_asset", asset, replace=True)
