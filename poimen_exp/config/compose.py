"""Composes the configuration outside of Hydra's own command line: for tests, the CLI and notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from poimen_exp.config.keys import check_keys, is_known, unknown_key
from poimen_exp.config.paths import conf_dir, experiments
from poimen_exp.errors import Refused
from poimen_exp.wording import meant

CONFIG_NAME = "config"


def compose_config(overrides: Sequence[str] = ()) -> DictConfig:
    """The composed configuration of a single run, its keys checked, without its ``hydra`` node.

    Raises:
        Refused: an override or a file that does not compose, an unknown key.
    """
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = compose(CONFIG_NAME, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise Refused(hydra_message(error)) from error
    check_keys(cfg)
    return cfg


def hydra_message(error: BaseException) -> str:
    """What Hydra says, with the cause that it keeps apart; of an unknown option or a bare word, what was meant."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        near = meant(name, error.options, f"{group}=")
        return f"{group}: got {name}, expected one of {', '.join(error.options)}{near}"
    if isinstance(error, OverrideParseException) and "=" not in error.override:
        near = meant(error.override, experiments(), "+experiment=")
        return f"{error.override}: got no value, expected KEY=VALUE{near}"
    cause = error.__cause__
    lines = [str(error)] + ([str(cause)] if isinstance(cause, OmegaConfBaseException) else [])
    return "\n".join(dict.fromkeys(line for line in lines if line))


def override(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A copy of a composed or loaded configuration with ``key=value`` lines on top; ``+`` where the key is new.

    Raises:
        Refused: a line that does not parse, an unknown key, several values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    out = cfg.copy()
    OmegaConf.set_struct(out, False)
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise Refused(hydra_message(error)) from error
    for line in parsed:
        if line.is_sweep_override() or line.is_delete():
            raise Refused(f"{line.input_line}: expected KEY=VALUE with one value")
        if not is_known(line.key_or_group):
            raise Refused(unknown_key(line.key_or_group, f" ({line.input_line})"))
        OmegaConf.update(out, line.key_or_group, line.value(), force_add=True)
    return out
