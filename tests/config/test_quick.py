from __future__ import annotations

from io import StringIO
from pathlib import Path

import omegaconf
import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf import _utils as utils
from omegaconf.errors import GrammarParseError

from poimen_exp.config import quick
from poimen_exp.config.compose import compose_config
from poimen_exp.config.paths import conf_dir, verl_config_dir
from poimen_exp.config.tree import resolved


def test_all_are_in_place_and_stay_so() -> None:
    before = omegaconf.base.parse, utils.get_yaml_loader, OmegaConf.load
    assert before == (utils.parse, quick._loader_on_libyaml, quick._load)
    quick.quicken()
    assert (omegaconf.base.parse, utils.get_yaml_loader, OmegaConf.load) == before


def test_a_composition_resolves_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    quicker = resolved(compose_config(["+experiment=quickstart", "trainer.experiment_name=x"]))
    for module in (omegaconf.base, utils):
        monkeypatch.setattr(module, "parse", omegaconf.grammar_parser.parse)
    monkeypatch.setattr(utils, "get_yaml_loader", quick._plain_loader)
    monkeypatch.setattr(OmegaConf, "load", quick._plain_load)
    assert resolved(compose_config(["+experiment=quickstart", "trainer.experiment_name=x"])) == quicker


@pytest.mark.parametrize("folder", [conf_dir(), verl_config_dir()], ids=["ours", "verl's"])
def test_every_file_of_the_tree_loads_as_without(folder: Path) -> None:
    files = sorted(folder.rglob("*.yaml"))
    assert len(files) > 10
    for file in files:
        assert yaml.load(file.read_text(), quick._loader_on_libyaml()) == yaml.load(
            file.read_text(), quick._plain_loader()
        ), file


@pytest.mark.parametrize(
    "text", ["a: 1e-3", "a: 1_000", "a: 2020-01-01", "a: 0x1F", "a: on", "a: é", "- .inf", "a:", ""]
)
def test_scalars_load_as_without(text: str) -> None:
    mine, plain = (yaml.load(text, loader()) for loader in (quick._loader_on_libyaml, quick._plain_loader))
    assert (repr(mine), type(mine)) == (repr(plain), type(plain))


def test_a_key_that_stands_twice_and_text_that_is_no_interpolation_are_refused_as_without() -> None:
    with pytest.raises(yaml.constructor.ConstructorError, match="found duplicate key a"):
        OmegaConf.load(StringIO("a: 1\na: 2\n"))
    for _ in range(2):
        with pytest.raises(GrammarParseError):
            OmegaConf.create({"a": "${b"})


def test_a_text_that_was_parsed_follows_what_it_names_now() -> None:
    cfg = OmegaConf.create({"a": "${oc.select:b,none}-${c}", "b": 1, "c": 2})
    assert cfg.a == "1-2"
    cfg.b, cfg.c = 3, 4
    assert cfg.a == "3-4"
    assert OmegaConf.create({"a": "${oc.select:b,none}-${c}", "c": 5}).a == "none-5"


def test_a_file_that_was_loaded_is_as_it_now_stands_whatever_was_done_to_the_tree(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: {b: [1, 2]}\n")
    first = OmegaConf.load(file)
    first.a.b.append(3)
    with file.open() as opened:
        assert OmegaConf.load(opened) == {"a": {"b": [1, 2]}} == OmegaConf.load(str(file))
    file.write_text("a: {b: [1, 4]}\n")
    assert OmegaConf.load(file) == {"a": {"b": [1, 4]}}
    assert OmegaConf.load(StringIO("")) == {}


def test_text_that_is_no_yaml_is_told_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: [\n")
    with pytest.raises(yaml.parser.ParserError, match=f'in "{file}", line 2'):
        OmegaConf.load(file)
