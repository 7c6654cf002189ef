"""What a run is refused for before its folder is made, and before what takes long."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from poimen_exp.__main__ import main
from poimen_exp.errors import Refused


@pytest.mark.parametrize("experiment", ["quickstart", "grpo"])
def test_a_gpu_that_is_not_there_is_refused_without_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], experiment: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([f"+experiment={experiment}", "device=cuda"]) == 2
    assert capsys.readouterr().err == (
        "poimen_exp: device: got cuda, but torch sees no GPU; use device=auto or device=cpu\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("experiment", ["quickstart", "verl_smoke"])
def test_a_corpus_that_is_not_there_is_refused_by_its_key_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], experiment: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("poimen_exp.solo.policy", "poimen_exp.verl_backend.preflight"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it would be an ImportError
    assert main([f"+experiment={experiment}", f"corpus.path={tmp_path}/none"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"poimen_exp: corpus.path={tmp_path}/none: no manifest.json there; expected a folder with ")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_adapter_name_is_refused_before_the_adapter_is_looked_at(tmp_path: Path) -> None:
    from poimen_exp.adapters.publish import publish_adapter
    from poimen_exp.adapters.registry import Registry

    with pytest.raises(Refused, match="adapter name 'Gates X': expected 1 to 64 of a-z"):
        publish_adapter(tmp_path / "no-run", "Gates X", Registry(str(tmp_path / "registry")))
