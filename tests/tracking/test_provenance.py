"""Which commit the code is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from poimen_exp.tracking.provenance import git_state


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for name, value in {"NAME": "n", "EMAIL": "n@example.org"}.items():
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text("a = 1\n")
    git(tmp_path, "init", "--quiet")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_named_and_changed_files_make_it_dirty(checkout: Path) -> None:
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "-m", "first")
    state = git_state(checkout / "code")
    assert state is not None
    assert (state.commit, state.dirty) == (git(checkout, "rev-parse", "HEAD"), False)
    (checkout / "code/a.py").write_text("a = 2\n")
    state = git_state(checkout / "code")
    assert state is not None
    assert state.dirty


def test_a_checkout_without_a_commit_has_none(checkout: Path) -> None:
    assert git_state(checkout / "code") is None


def test_code_installed_inside_another_checkout_is_not_of_its_commit(checkout: Path) -> None:
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "-m", "first")
    (checkout / "site-packages").mkdir()
    (checkout / "site-packages/b.py").touch()
    assert git_state(checkout / "site-packages") is None


def test_a_folder_outside_any_checkout_has_no_commit(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
