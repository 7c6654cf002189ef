from __future__ import annotations

import importlib.metadata

import pytest
from omegaconf import OmegaConf

from poimen_exp.config.tree import check_verl_version, compose_leaves, differences, verl_tree, walk
from poimen_exp.errors import Refused


def test_the_committed_tree_is_that_of_the_installed_verl() -> None:
    assert differences(verl_tree().leaves, compose_leaves()) == []
    assert verl_tree().version == importlib.metadata.version("verl") == "0.9.1"


def test_another_verl_is_refused_with_the_keys_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(verl_tree().leaves)
    del found["trainer.test_freq"]
    found |= {"trainer.validate_every": 5, "trainer.save_freq": 7}
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.10.0")
    with pytest.raises(Refused) as refusal:
        check_verl_version(found)
    message = str(refusal.value)
    assert "got version 0.10.0, expected 0.9.1" in message
    assert message.splitlines()[1:] == [
        "  ! trainer.save_freq: -1 -> 7",
        "  - trainer.test_freq: -1",
        "  + trainer.validate_every: 5",
    ]


def test_walking_does_not_enter_what_is_open_and_does_not_follow_interpolations() -> None:
    cfg = OmegaConf.create({"a": {"b": 1, "open": {"x": 2}}, "c": "${a}", "d": {}})
    assert [path for path, _ in walk(cfg, stop=frozenset({"a.open"}))] == ["a.b", "a.open", "c", "d"]
