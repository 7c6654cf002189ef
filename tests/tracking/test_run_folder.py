"""The run folder and its lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from poimen_exp.errors import Refused
from poimen_exp.tracking import files
from poimen_exp.tracking.files import read_json, write_atomic
from poimen_exp.tracking.lock import FolderLock, live_holder
from poimen_exp.tracking.metrics_log import MetricsLog, read_metrics
from poimen_exp.tracking.provenance import CorpusFacts, collect_provenance
from poimen_exp.tracking.result import RunResult
from poimen_exp.tracking.run_folder import RunFolder

REWARD, N = {"train/reward/total": 1.0}, {"train/reward/total": 4}
WRITER = """
import sys, time
from pathlib import Path
from poimen_exp.tracking.metrics_log import MetricsLog
from poimen_exp.tracking.run_folder import RunFolder
folder = RunFolder.create(Path(sys.argv[1]))
log = MetricsLog(folder.metrics)
for step in (1, 2):
    log.append(step, {"train/reward/total": 1.0}, {"train/reward/total": 4})
log._file.write(b'{"step": 3, "time'); log._file.flush()
print("ready", flush=True)
time.sleep(60)
"""
FORKER = """
import os, subprocess, sys, time
from pathlib import Path
from poimen_exp.tracking.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    lock.release()
    time.sleep(20)
    os._exit(0)
ask = "import sys; from pathlib import Path; from poimen_exp.tracking.lock import live_holder; "
ask += "print(live_holder(Path(sys.argv[1])) is not None, flush=True)"
subprocess.run([sys.executable, "-c", ask, sys.argv[1]], check=True)
lock.release()
subprocess.run([sys.executable, "-c", ask, sys.argv[1]], check=True)
os.kill(child, 9)
"""
ASKER_AND_TAKER = """
import sys
from pathlib import Path
from poimen_exp.tracking.lock import FolderLock, live_holder
print(live_holder(Path(sys.argv[1])), flush=True)
FolderLock(Path(sys.argv[1]))
print("taken")
"""


@contextmanager
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder, two lines and a half in its log."""
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_folder_that_hydra_made_becomes_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "__main__.log").touch()
    with RunFolder.create(tmp_path) as folder:
        folder.write_resolved("alpha: 0.9\n")
        assert live_holder(tmp_path) is not None
    assert folder.resolved.read_text() == "alpha: 0.9\n"
    assert live_holder(tmp_path) is None
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "resolved.yaml", "checkpoints"])
def test_no_run_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir() if name == "checkpoints" else (tmp_path / name).touch()
    with pytest.raises(Refused, match=rf"already holds a run \({name}\).*poimen resume"):
        RunFolder.create(tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_two_processes_never_write_one_folder(tmp_path: Path) -> None:
    with writer(tmp_path / "0") as other:
        for attempt in (lambda: RunFolder.create(tmp_path / "0"), lambda: RunFolder.open(tmp_path / "0", "resume")):
            with pytest.raises(Refused, match=f"held by process {other.pid} on "):
                attempt()
        holder = live_holder(tmp_path / "0")
        assert holder is not None
        assert holder.pid == other.pid
        # Asking and being refused must not have freed it: closing a file of a record lock is how one frees it.
        with pytest.raises(Refused, match="held by"):
            FolderLock(tmp_path / "0")


def test_one_process_does_not_hold_a_folder_twice(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path), pytest.raises(Refused, match=f"held by process {os.getpid()} "):
        FolderLock(tmp_path)


def test_the_lock_of_a_killed_process_is_stale_and_its_run_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "0"
    with writer(path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert (path / ".lock").exists()
    assert live_holder(path) is None
    with RunFolder.open(path, "resume") as folder:
        assert folder.stale is not None
        assert folder.stale.pid == other.pid
        log = MetricsLog(folder.metrics)
        assert log.last_step == 2
        log.close()
    assert [line.step for line in read_metrics(path / "metrics.jsonl").lines] == [1, 2]
    assert (path / "recovery-tails/metrics-unfinished-line.jsonl").read_bytes() == b'{"step": 3, "time'


def test_whoever_asks_about_a_stale_lock_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lock").write_text("{}")
    close, answers = os.close, []

    def others_come_before(descriptor: int) -> None:
        monkeypatch.setattr(os, "close", close)
        command = [sys.executable, "-c", ASKER_AND_TAKER, str(tmp_path)]
        answers.append(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        close(descriptor)

    monkeypatch.setattr(os, "close", others_come_before)
    assert live_holder(tmp_path) is None
    assert answers == ["None\ntaken\n"]


def test_a_forked_child_neither_frees_nor_keeps_the_lock(tmp_path: Path) -> None:
    # In a process of its own: forking one with threads, as pytest's may have, is deprecated.
    done = subprocess.run([sys.executable, "-c", FORKER, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_folder_without_a_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no run lies here"):
        RunFolder.open(tmp_path, "read")


def test_a_worker_attaches_only_to_a_run_that_somebody_holds(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.write_resolved("{}")
        assert RunFolder.open(tmp_path, "attach").path == tmp_path
    with pytest.raises(Refused, match="no process holds this run"):
        RunFolder.open(tmp_path, "attach")


def test_a_resumed_run_has_not_finished_until_it_ends_again(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.write_result(RunResult("completed", step=3))
    with RunFolder.open(tmp_path, "resume") as folder:
        assert folder.read_result() is None
        assert read_json(folder.recovery_tails / "result.json")["step"] == 3


def test_rewinding_takes_back_lines_rollouts_and_checkpoints_and_keeps_them(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        log = MetricsLog(folder.metrics)
        log.append(1, REWARD, N)
        offset = log.position
        log.append(2, REWARD, N)
        folder.trajectories.mkdir()
        for name in ("step_1", "step_2", "val_1", "val_2"):
            (folder.trajectories / f"{name}.jsonl").touch()
        for step in (1, 2):
            folder.checkpoint(step).mkdir(parents=True)
            (folder.checkpoint(step) / "manifest.json").touch()
        kept = folder.rewind(log, 1, offset)
        log.close()
    assert {path.name: step for path, step in folder.trajectory_files().items()} == {
        "step_1.jsonl": 1,
        "val_1.jsonl": 1,
    }
    assert folder.checkpoint_steps() == (1,)
    assert sorted(path.name for path in kept) == [
        "checkpoints-global_step_2",
        "metrics-from-step-2.jsonl",
        "trajectories-step_2.jsonl",
        "trajectories-val_2.jsonl",
    ]
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize(
    ("path", "run_id"),
    [
        ("work/multirun/quickstart/2026-11-30_06-57-24-924915/0", "quickstart/2026-11-30_06-57-24-924915/0"),
        ("multirun/old/multirun/new/1", "new/1"),
        ("work/short", "short"),
        ("work/sweep/12", "sweep/12"),
        ("work/multirun", "multirun"),
    ],
)
def test_a_run_id_finds_the_run(tmp_path: Path, path: str, run_id: str) -> None:
    assert RunFolder(tmp_path / path, None).run_id == run_id


def test_a_checkpoint_counts_when_its_manifest_is_there(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        for step in (10, 9, 2):
            folder.checkpoint(step).mkdir(parents=True)
        for step in (10, 2):
            (folder.checkpoint(step) / "manifest.json").touch()
        (folder.checkpoints / ".global_step_11.writing").mkdir()
        assert folder.checkpoint_steps() == (2, 10)
        assert folder.checkpoint_steps(complete=False) == (9,)


def test_provenance_says_what_the_run_was_made_of(tmp_path: Path) -> None:
    facts = CorpusFacts("logs", "ab" * 32, "unmeasured")
    provenance = collect_provenance(seed=7, device="cpu", corpus=facts, command=["poimen", "x=1"])
    with RunFolder.create(tmp_path) as folder:
        folder.write_provenance(provenance)
        folder.write_provenance(provenance)
    data = read_json(folder.provenance)
    assert data["schema"] == "poimen.provenance/1"
    assert data["seed"] == 7
    assert data["device"] == "cpu"
    assert data["command"] == ["poimen", "x=1"]
    assert data["corpus"] == {"corpus_id": "logs", "sha256": "ab" * 32, "label_status": "unmeasured"}
    assert data["python"] == ".".join(map(str, sys.version_info[:3]))
    assert data["versions"]["hydra-core"] == "1.3.8"
    assert "vllm-nothing" not in data["versions"]
    assert (tmp_path / "provenance-before-resume.json").exists()


def test_a_new_folder_is_nobody_elses_also_where_another_makes_the_free_name_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.new_folder(tmp_path / "refused", "noon") == tmp_path / "refused/noon"
    free = files.free_name

    def taken_first(folder: Path, name: str) -> Path:
        monkeypatch.undo()
        path = free(folder, name)
        path.mkdir()
        return path

    monkeypatch.setattr(files, "free_name", taken_first)
    assert files.new_folder(tmp_path / "refused", "noon") == tmp_path / "refused/noon-3"


def test_two_that_write_one_file_at_once_leave_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers that share a folder may share process ids as well."""
    fsync, path = os.fsync, tmp_path / "file"

    def overtaken(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        write_atomic(path, b"theirs")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", overtaken)
    write_atomic(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert list(tmp_path.iterdir()) == [path]
