"""The W&B workspace, built without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from poimen_exp.errors import Refused
from poimen_exp.sweep import dashboard
from poimen_exp.sweep.dashboard import Place, as_json, build_workspace, place_of, write_dashboard

GOLDEN = Path(__file__).parent / "golden" / "dashboard.json"


def _sweep(tmp_path: Path, group: str) -> Path:
    folder = tmp_path / "paper" / "noon"
    (folder / "0/.hydra").mkdir(parents=True)
    text = f"tracking:\n  project: gates\n  entity: null\n  group: {group}\n"
    (folder / "0/.hydra/config.yaml").write_text(text)
    return folder


def test_the_workspace_is_the_golden_file() -> None:
    assert as_json(build_workspace(Place("team", "poimen", "paper/noon"))) == GOLDEN.read_text()


def test_the_place_is_the_sweeps_unless_the_user_says_another(tmp_path: Path) -> None:
    assert place_of(_sweep(tmp_path, "null"), None, None) == Place("", "gates", "paper/noon")
    assert place_of(tmp_path / "paper/noon", "team", "other") == Place("team", "other", "paper/noon")
    assert place_of(None, None, None) == Place("", "poimen", None)
    with pytest.raises(Refused, match="no run lies here"):
        place_of(tmp_path, None, None)


def test_a_group_that_the_sweep_named_is_kept(tmp_path: Path) -> None:
    assert place_of(_sweep(tmp_path, "mine"), None, None).group == "mine"


class _Reached:
    def __init__(self, refuse: bool) -> None:
        self.refuse, self.saved = refuse, 0

    def require(self) -> None:
        if self.refuse:
            raise Refused("no key")

    def save(self, workspace: Any) -> None:
        assert workspace.entity == "team"
        self.saved += 1


@pytest.mark.parametrize(("key", "save", "saved"), [(True, None, 1), (True, False, 0), (False, None, 0)])
def test_it_is_saved_where_there_is_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bool, save: bool | None, saved: int
) -> None:
    workspace = dashboard.libraries()[1].Workspace
    server = _Reached(refuse=not key)
    monkeypatch.setattr(dashboard, "require_online", server.require)
    monkeypatch.setattr(workspace, "save", lambda self: server.save(self))
    monkeypatch.setattr(workspace, "url", property(lambda _: "https://w.example/nw"))
    said = write_dashboard(Place("team", "poimen", None), tmp_path / "d.json", save=save)
    assert (tmp_path / "d.json").is_file()
    assert server.saved == saved
    assert ("saved as https://w.example/nw" in said) == bool(saved)
    assert ("not saved to W&B: no key" in said) == (not key)


def test_saving_on_demand_without_a_key_is_refused_after_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "require_online", _Reached(refuse=True).require)
    with pytest.raises(Refused, match="no key"):
        write_dashboard(Place("team", "poimen", None), tmp_path / "d.json", save=True)
    assert (tmp_path / "d.json").is_file()
