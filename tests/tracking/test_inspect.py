"""``poimen inspect``: nothing is told of a run whose files are not what was written."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from poimen_exp import cli
from poimen_exp.errors import Refused
from poimen_exp.tracking.inspect import Spread, inspect_run, run_inspect
from poimen_exp.tracking.lock import FolderLock
from poimen_exp.tracking.metrics_log import MetricsLog
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.sums import drop_sums, note_sum

from .support import make_run, save


def poimen(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["poimen", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_a_sound_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "0")
    assert poimen(monkeypatch, "inspect", str(tmp_path / "0"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    # 3 JSON files, the configuration, the log, 2 x (manifest + file + offset), 2 x 2 files of rollouts with their
    # hashes, the result
    assert (report["verified_files"], report["damaged"], report["notes"]) == (17, [], [])
    assert (report["status"], report["device"]) == ("completed", "cpu: test")
    assert report["counters"] == {
        "last_step": 2,
        "validations": 3,
        "checkpoints": [1, 2],
        "optimizer_steps_skipped": 2,
        "rollouts": 4,
        "rollouts_failed": 0,
        "validation_rollouts": 2,
        "turns": 8,
        "prompt_tokens": 80,
        "response_tokens": 20,
    }
    assert report["rewards"]["val/reward/total"] == {
        "first": {"step": 0, "value": 0.5, "n": 8},
        "best": {"step": 2, "value": 1.5, "n": 8},
        "last": {"step": 2, "value": 1.5, "n": 8},
    }
    assert list(report["rewards"]["train/reward/total"]) == ["first", "last"]
    assert report["gates"] == {
        "train/gates/update_accuracy/evidence_free": {"step": 2, "value": 0.5, "n": 6},
        "val/gates/exit/exact": {"step": 2, "value": 0.25, "n": 6},
    }
    # a step has 1, 0.5, -1, 0: mean 0.125, mean square 2.25 / 4
    assert report["advantages"] == pytest.approx(
        {"n": 8, "mean": 0.125, "std": (0.5625 - 0.125**2) ** 0.5, "min": -1.0, "max": 1.0, "zero_share": 0.25}
    )
    assert (report["memory"]["peak_device_gb"], report["memory"]["predicted_gb"]) == (2.0, 2.5)
    assert report["times"]["phases"]["timing_s/gen"] == {"n": 2, "total_s": 6.0, "mean_s": 3.0}


def test_the_text_has_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "0")
    assert poimen(monkeypatch, "inspect", str(tmp_path / "0")) == 0
    text = capsys.readouterr().out
    assert "17 files verified, 0 damaged" in text
    of = "n 8 trajectories, step"
    assert f"val/reward/total: first 0.500 ({of} 0), best 1.500 ({of} 2), last 1.500 ({of} 2)\n" in text
    assert "optimizer steps skipped: 2\n" in text
    assert "advantages of turns: n 8, mean 0.125, " in text
    assert "response tokens: 20" in text
    assert "train/gates/update_accuracy/evidence_free: last 0.500 (n 6 chunks, step 2)" in text
    assert "val/gates/exit/exact: last 0.250 (n 6 trajectories, step 2)" in text
    assert "device memory, peak: 2.00 GB (predicted 2.50 GB)" in text
    assert "base" in text


def test_a_large_count_is_told_in_full(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    record = folder.trajectory_file(2).read_text().split("\n")[0]
    folder.trajectory_file(2).write_text("\n".join([record] * 5523) + "\n")
    note_sum(folder.trajectory_file(2))
    out = io.StringIO()
    run_inspect(tmp_path, as_json=False, console=Console(file=out, width=100))
    # two rollouts of step 1 and 5,523 of step 2, two turns each
    assert "turns: 11,050\n" in out.getvalue()
    assert "advantages of turns: n 11,050, " in out.getvalue()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def resum(path: Path, old: str, new: str) -> None:
    """Changes a file of rollouts and its hash: only its content is wrong."""
    rewrite(path, old, new)
    note_sum(path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    note_sum(path)


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("checkpoints/global_step_1/adapter.safetensors", flip, "got sha256"),
    ("checkpoints/global_step_2/adapter.safetensors", Path.unlink, "missing"),
    ("checkpoints/global_step_2/adapter.safetensors", lambda path: path.write_bytes(b"\2" * 99) and None, "99 bytes"),
    ("checkpoints/global_step_1/manifest.json", lambda path: rewrite(path, '"step": 1', '"step": 2'), "says step 2"),
    ("checkpoints/global_step_1/manifest.json", lambda path: rewrite(path, "adapter.", "../a."), "leaves the"),
    ("checkpoints/global_step_1/manifest.json", lambda path: path.write_text("{") and None, "damaged"),
    ("trajectories/step_1.jsonl", lambda path: cut(path), "cut short"),
    ("trajectories/step_1.jsonl", lambda path: rewrite(path, "Paris", "Paros"), "got sha256"),
    ("trajectories/step_2.jsonl", Path.unlink, "missing"),
    ("trajectories/val_2.jsonl", lambda path: resum(path, '"step":2', '"step":1'), "holds a rollout of step 1"),
    ("trajectories/SHA256SUMS", lambda path: path.write_text("x") and None, "expected a SHA-256, two spaces"),
    ("metrics.jsonl", lambda path: rewrite(path, '0.25', '0.75'), "are not those that step 1's checkpoint was saved"),
    ("resolved.yaml", lambda path: path.write_text("a: [") and None, "damaged: not YAML"),
    ("resolved.yaml", lambda path: path.write_text("- 1") and None, "expected a mapping"),
    ("adapter/poimen.json", lambda path: path.parent.mkdir(), "no readable poimen.json"),
    ("metrics.jsonl", lambda path: rewrite(path, '"counts"', '"count"'), "damaged"),
    ("metrics.jsonl", Path.unlink, "missing"),
    ("provenance.json", lambda path: path.write_text("{") and None, "damaged: not JSON"),
    ("gate_check.json", lambda path: path.write_text("") and None, "damaged: not JSON"),
    ("result.json", lambda path: rewrite(path, "1.5", "1.75"), "got 1.75, but metrics.jsonl has 1.5"),
    ("result.json", lambda path: rewrite(path, '"adapter": null', '"adapter": "adapter"'), "is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "harm", "problem"), DAMAGES)
def test_a_damaged_file_is_named_and_nothing_else_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    harm: Callable[[Path], None],
    problem: str,
) -> None:
    make_run(tmp_path)
    harm(tmp_path / name)
    assert poimen(monkeypatch, "inspect", str(tmp_path), "--json") == 1
    captured = capsys.readouterr()
    report: dict[str, Any] = json.loads(captured.out)
    assert not report["ok"]
    assert name in [finding["file"] for finding in report["damaged"]]
    assert problem in next(finding["problem"] for finding in report["damaged"] if finding["file"] == name)
    assert "rewards" not in report
    assert name in captured.err


def test_a_file_without_a_hash_is_noted_and_told_from_a_changed_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    drop_sums(folder.trajectories, {"step_2.jsonl"})
    report = inspect_run(tmp_path)
    assert (report["ok"], report["counters"]["rollouts"]) == (True, 4)
    assert report["notes"] == ["trajectories/step_2.jsonl: no hash: the run was killed behind it"]


def test_a_file_beside_those_of_a_checkpoint_is_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder.checkpoint(2) / "critic.safetensors").write_bytes(b"1")
    assert inspect_run(tmp_path)["notes"] == [
        "checkpoints/global_step_2/critic.safetensors: not in the checkpoint's manifest: it is not used"
    ]


def test_what_a_resumed_run_did_again_is_kept_and_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    again = (folder.trajectory_file(2).read_bytes(), folder.metrics.read_bytes().splitlines(keepends=True)[2:])
    with RunFolder.open(tmp_path, "resume") as opened:
        log = MetricsLog(opened.metrics)
        manifest = json.loads((opened.checkpoint(1) / "manifest.json").read_text())
        opened.rewind(log, 1, manifest["metrics_bytes"])
        log.close()
    report = inspect_run(tmp_path)
    assert (report["ok"], report["counters"]["last_step"], report["counters"]["checkpoints"]) == (True, 1, [1])
    names = "checkpoints-global_step_2, metrics-from-step-2.jsonl, result.json, trajectories-step_2.jsonl"
    assert (
        f"recovery-tails: 5 kept of what a resumed run did again: {names}, trajectories-val_2.jsonl" in report["notes"]
    )
    tails = folder.recovery_tails
    kept = ((tails / "trajectories-step_2.jsonl").read_bytes(), [(tails / "metrics-from-step-2.jsonl").read_bytes()])
    assert kept == again


def test_a_log_that_lost_lines_is_damaged_although_every_line_of_it_is_whole(tmp_path: Path) -> None:
    make_run(tmp_path)
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    report = inspect_run(tmp_path)
    assert [finding["file"] for finding in report["damaged"]] == ["metrics.jsonl"]
    assert "step 2's checkpoint is not behind a whole line" in report["damaged"][0]["problem"]


def test_a_killed_run_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    folder.result.unlink()
    (tmp_path / ".lock").write_text("{}")
    (tmp_path / "metrics.jsonl").write_bytes(folder.metrics.read_bytes() + b'{"step": 3')
    save(folder, 3, 0)
    (folder.checkpoint(3) / "manifest.json").unlink()
    report = inspect_run(tmp_path)
    assert report["ok"]
    assert report["status"] is None
    assert report["counters"]["checkpoints"] == [1, 2]
    unfinished, checkpoint, line = report["notes"]
    assert "it was killed" in unfinished
    assert "poimen resume" in unfinished
    assert checkpoint.startswith("checkpoints/global_step_3: no manifest")
    assert line == "metrics.jsonl: the last line was not finished (10 bytes)"


def test_a_run_that_is_being_written_says_so(tmp_path: Path) -> None:
    make_run(tmp_path)
    lock = FolderLock(tmp_path)
    report = inspect_run(tmp_path)
    lock.release()
    assert report["notes"][0].startswith("being written by process ")


def saves_step_3(folder: RunFolder) -> None:
    log = MetricsLog(folder.metrics)
    log.append(3, {"update/skipped": 1}, {"update/skipped": 1})
    save(folder, 3, log.position)
    log.close()


def prunes(folder: RunFolder) -> None:
    shutil.rmtree(folder.checkpoint(1))


def starts_again(folder: RunFolder) -> None:
    folder.result.unlink()
    log = MetricsLog(folder.metrics)
    folder.rewind(log, -1, 0)
    log.close()


@pytest.mark.parametrize(
    ("reading", "act", "before"),
    [
        ("integrity._verify_file", prunes, True),
        ("integrity.read_metrics", saves_step_3, False),
        ("integrity.read_metrics", starts_again, False),
        ("integrity._verify_rollouts", starts_again, True),
        ("integrity.read_sums", starts_again, False),
        ("integrity._verify_result", starts_again, True),
        ("result.read_json", starts_again, True),
    ],
)
@pytest.mark.parametrize("ends", [False, True])
def test_what_a_live_run_does_meanwhile_is_no_damage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reading: str,
    act: Callable[[RunFolder], None],
    before: bool,
    ends: bool,
) -> None:
    folder = make_run(tmp_path)
    lock = FolderLock(tmp_path)
    module = importlib.import_module(f"poimen_exp.tracking.{reading.partition('.')[0]}")
    name = reading.partition(".")[2]
    real = getattr(module, name)

    def acts_meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(module, name, real)
        read = None if before else real(*arguments)
        act(folder)
        if ends:
            lock.release()
        return real(*arguments) if before else read

    monkeypatch.setattr(module, name, acts_meanwhile)
    report = inspect_run(tmp_path)
    lock.release()
    assert report["damaged"] == []


def test_a_damaged_file_of_a_live_run_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder.checkpoint(1) / "adapter.safetensors").unlink()
    folder.trajectory_file(1).unlink()
    lock = FolderLock(tmp_path)
    damaged = inspect_run(tmp_path)["damaged"]
    lock.release()
    names = ["checkpoints/global_step_1/adapter.safetensors", "trajectories/step_1.jsonl"]
    assert damaged == [{"file": name, "problem": "missing"} for name in names]


def test_a_sweep_is_not_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "0")
    with pytest.raises(Refused, match="a folder of several runs"):
        inspect_run(tmp_path)
    (tmp_path / "empty").mkdir()
    assert poimen(monkeypatch, "inspect", str(tmp_path / "empty")) == 2


def test_no_numbers_have_no_spread() -> None:
    assert Spread().summary() is None
