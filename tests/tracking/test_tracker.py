"""The tracker: the record first, W&B as a copy that can be read back and that may fail."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from poimen_exp.errors import EXIT_REFUSED, Refused, RunFailed
from poimen_exp.tracking import wandb_online
from poimen_exp.tracking.metrics_log import MetricLine, read_metrics
from poimen_exp.tracking.provenance import CorpusFacts, collect_provenance
from poimen_exp.tracking.run_folder import RunFolder
from poimen_exp.tracking.settings import TrackingSettings
from poimen_exp.tracking.tracker import Tracker

from .wandb_file import FULL, config, history, only, records, wandb_files

TRAIN, VAL = "train/reward/total", "val/reward/total"
OFFLINE, DISABLED = TrackingSettings(tags=("a",)), TrackingSettings(wandb="disabled")


def columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without W&B's own columns and the time."""
    return [{key: value for key, value in row.items() if key[0] != "_" and key != "time_s"} for row in rows]


@pytest.mark.usefixtures("wandb_home")
def test_the_offline_copy_holds_everything_that_was_logged(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "sweep/monday/3")
    facts = CorpusFacts("logs", "ab" * 32, "unmeasured")
    with folder, Tracker(folder, OFFLINE, {"alpha": 0.9, "data": {"seed": 1}}) as tracker:
        tracker.describe(collect_provenance(seed=1, device="cpu", corpus=facts))
        tracker.log(0, {VAL: 1.0}, {VAL: 8})
        tracker.log(1, {TRAIN: 0.5, "actor/pg_loss": 0.25}, {TRAIN: 16})
        tracker.log(2, {TRAIN: 0.75}, {TRAIN: 16})
        tracker.log(1, {VAL: 1.25}, {VAL: 8})  # an earlier step
        tracker.log(2, {VAL: 1.5}, {VAL: 8})  # an equal step
        tracker.finish("converged")
    (file,) = wandb_files(folder.path)
    assert columns(history(file)) == [
        {"step": 0, VAL: 1.0, f"counts/{VAL}": 8},
        {"step": 1, TRAIN: 0.5, "actor/pg_loss": 0.25, f"counts/{TRAIN}": 16},
        {"step": 2, TRAIN: 0.75, f"counts/{TRAIN}": 16},
        {"step": 1, VAL: 1.25, f"counts/{VAL}": 8},
        {"step": 2, VAL: 1.5, f"counts/{VAL}": 8},
    ]
    run = [record.run for record in records(file) if record.WhichOneof("record_type") == "run"][-1]
    assert (run.project, run.run_group, run.display_name, run.job_type) == (
        "poimen", "sweep/monday", "sweep/monday/3", "train",
    )  # fmt: skip
    assert list(run.tags) == ["a", "unmeasured-labels"]
    assert run.run_id == folder.wandb_id.read_text()
    assert config(file)["alpha"] == 0.9
    assert config(file)["data"] == {"seed": 1}
    assert config(file)["provenance"]["corpus"]["label_status"] == "unmeasured"
    assert only(file, "exit").exit_code == 0
    assert read_metrics(folder.metrics).lines[4].metrics == {VAL: 1.5}


@pytest.mark.usefixtures("wandb_home")
def test_train_and_validation_are_drawn_against_the_step(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with folder, Tracker(folder, OFFLINE, {}) as tracker:
        tracker.log(1, {TRAIN: 0.5}, {TRAIN: 16})
    (file,) = wandb_files(tmp_path)
    metrics = [record.metric for record in records(file) if record.WhichOneof("record_type") == "metric"]
    axes = {metric.glob_name or metric.name: metric.step_metric for metric in metrics}
    assert {axes["train/*"], axes["val/*"], axes["actor/*"], axes["counts/*"], axes[VAL]} == {"step"}
    assert next(metric for metric in metrics if metric.name == VAL).summary.max


def test_the_copy_is_read_when_wandb_has_written_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2 as pb

    kinds = (pb.Record(run=pb.RunRecord(run_id="r" * 40)), pb.Record(exit=pb.RunExitRecord(exit_code=1)))
    bodies = [record.SerializeToString() for record in kinds]
    framed = [struct.pack("<IHB", 0, len(body), FULL) + body for body in bodies]
    data = iter(struct.pack("<4sHB", b":W&B", 0xBEE1, 0) + b"".join(framed))
    file = tmp_path / "run.wandb"
    file.touch()

    def written_meanwhile(_: float) -> None:
        with file.open("ab") as end:
            end.write(bytes(islice(data, 3)))

    monkeypatch.setattr(time, "sleep", written_meanwhile)
    assert [record.WhichOneof("record_type") for record in records(file)] == ["run", "exit"]


@pytest.mark.usefixtures("wandb_home")
def test_a_run_that_ends_by_an_error_is_marked_failed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "0")
    with pytest.raises(RunFailed, match="collapse"), folder, Tracker(folder, OFFLINE, {}):
        raise RunFailed("collapse")
    (file,) = wandb_files(folder.path)
    assert only(file, "exit").exit_code == 1
    # The next job of the sweep is a run of its own.
    second = RunFolder.create(tmp_path / "1")
    with second, Tracker(second, OFFLINE, {}) as tracker:
        tracker.log(1, {TRAIN: 0.5}, {TRAIN: 16})
    (other,) = wandb_files(second.path)
    assert only(other, "run").run_id != only(file, "run").run_id
    assert only(other, "exit").exit_code == 0


@pytest.mark.usefixtures("wandb_home")
def test_ctrl_c_is_recorded_as_interrupted(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with pytest.raises(KeyboardInterrupt), folder, Tracker(folder, OFFLINE, {}):
        raise KeyboardInterrupt
    (file,) = wandb_files(tmp_path)
    assert only(file, "exit").exit_code == 1


@pytest.mark.usefixtures("wandb_home")
def test_a_resumed_run_goes_on_in_the_same_wandb_run_and_drops_no_row(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with folder, Tracker(folder, OFFLINE, {}) as tracker:
        tracker.log(1, {TRAIN: 0.1}, {TRAIN: 16})
        saved = tracker.metrics_bytes
        tracker.log(2, {TRAIN: 0.2}, {TRAIN: 16})
    time.sleep(1.1)  # W&B names its folders by the second
    folder = RunFolder.open(tmp_path, "resume")
    with folder, Tracker(folder, OFFLINE, {}) as tracker:
        tracker.rewind(1, saved)
        tracker.log(2, {TRAIN: 0.2}, {TRAIN: 16})
        tracker.log(3, {TRAIN: 0.3}, {TRAIN: 16})
    first, second = wandb_files(tmp_path)
    assert only(first, "run").run_id == only(second, "run").run_id
    assert [row["_step"] for row in history(first)] == [0, 1]
    assert [row["_step"] for row in history(second)] == [2, 3]  # W&B drops rows whose counter runs backwards
    assert [line.step for line in read_metrics(folder.metrics).lines] == [1, 2, 3]


@pytest.mark.parametrize(
    ("step", "last", "said"),
    [
        (1, 3, "3 files of steps behind step 1 moved to {}: metrics-from-step-2.jsonl, {}"),
        (-1, 7, "8 files of all steps moved to {}: metrics-from-step-0.jsonl, {}"),
        (-1, 9, "10 files of all steps moved to {}: metrics-from-step-0.jsonl, {} and 2 more"),
    ],
    ids=["to-a-checkpoint", "to-the-beginning", "many"],
)
def test_what_a_resumed_run_moves_away_is_told_in_one_line(tmp_path: Path, step: int, last: int, said: str) -> None:
    told: list[str] = []
    folder = RunFolder.create(tmp_path)
    with folder, Tracker(folder, DISABLED, {}, say=told.append) as tracker:
        tracker.log(1, {TRAIN: 0.1}, {TRAIN: 16})
        offset = tracker.metrics_bytes if step == 1 else 0
        tracker.log(2, {TRAIN: 0.1}, {TRAIN: 16})
        folder.trajectories.mkdir()
        for number in range(1, last + 1):
            folder.trajectory_file(number).touch()
        tracker.rewind(step, offset)
        tracker.rewind(step, offset)  # nothing is left to move, nothing to tell
    late = range(max(step, 0) + 1, min(last, 7) + 1)  # with the metrics eight names at most
    names = ", ".join(f"trajectories-step_{number}.jsonl" for number in late)
    assert told == [said.format(folder.recovery_tails, names)]


@pytest.mark.usefixtures("wandb_home")
def test_wandb_that_fails_in_the_middle_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    said: list[str] = []
    folder = RunFolder.create(tmp_path)
    with folder, Tracker(folder, OFFLINE, {}, say=said.append) as tracker:
        tracker.log(1, {TRAIN: 0.1}, {TRAIN: 16})
        with monkeypatch.context() as patch:
            patch.setattr(wandb.Run, "log", raises)
            tracker.log(2, {TRAIN: 0.2}, {TRAIN: 16})
            tracker.log(3, {TRAIN: 0.3}, {TRAIN: 16})
    assert len(said) == 1
    assert "W&B: log failed (OSError('disk full')): no further copy" in said[0]
    assert [line.step for line in read_metrics(folder.metrics).lines] == [1, 2, 3]


@pytest.mark.usefixtures("wandb_home")
def test_wandb_that_does_not_start_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setattr(wandb, "init", raises)
    said: list[str] = []
    folder = RunFolder.create(tmp_path)
    with folder, Tracker(folder, OFFLINE, {}, say=said.append) as tracker:
        tracker.log(1, {TRAIN: 0.1}, {TRAIN: 16})
    assert len(said) == 1
    assert "W&B: start failed" in said[0]
    assert len(read_metrics(folder.metrics).lines) == 1


def raises(*_args: object, **_kwargs: object) -> None:
    raise OSError("disk full")


def test_tracking_none_makes_no_copy_and_the_listeners_hear_every_line(tmp_path: Path) -> None:
    heard: list[MetricLine] = []
    folder = RunFolder.create(tmp_path)
    with folder, Tracker(folder, DISABLED, {}, listeners=[heard.append]) as tracker:
        tracker.log(1, {TRAIN: 0.1}, {TRAIN: 16})
    assert [(line.step, line.metrics, line.counts) for line in heard] == [(1, {TRAIN: 0.1}, {TRAIN: 16})]
    assert not folder.wandb.exists()


@pytest.mark.parametrize(("every", "written"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (0, [])])
def test_rollouts_of_every_nth_step_are_written(tmp_path: Path, every: int, written: list[int]) -> None:
    folder = RunFolder.create(tmp_path)
    with folder, Tracker(folder, TrackingSettings(wandb="disabled", trajectory_freq=every), {}) as tracker:
        for step in (1, 2, 3, 4):
            tracker.write_trajectories(step, [])
    assert list(folder.trajectory_files().values()) == written


@pytest.mark.usefixtures("wandb_home")
def test_online_without_a_key_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with folder, pytest.raises(Refused, match=r"no key for .*wandb login.*tracking.wandb=offline") as refusal:
        Tracker(folder, TrackingSettings(wandb="online"), {})
    assert refusal.value.exit_code == EXIT_REFUSED
    assert not folder.metrics.exists()


KEY = "k" * 40


@contextmanager
def server(answer: Any, status: int = 200, delay_s: float = 0.0) -> Iterator[tuple[str, list[str | None]]]:
    """Something that answers every POST with ``answer``; gives its address and the Authorization headers it saw."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(self.headers["Authorization"])
            time.sleep(delay_s)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_args: object) -> None:
            return

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}", seen
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.mark.usefixtures("wandb_home")
def test_online_with_a_key_that_the_server_knows_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with server({"data": {"viewer": {"id": "u"}}}) as (address, seen):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        wandb_online.require_online()
    assert len(seen) == 1
    assert seen[0] is not None


def test_the_key_may_stand_in_netrc(wandb_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server({"data": {"viewer": {"id": "u"}}}) as (address, seen):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        (wandb_home / ".netrc").write_text(f"machine {address.removeprefix('http://')} login user password {KEY}\n")
        (wandb_home / ".netrc").chmod(0o600)
        wandb_online.require_online()
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("answer", "status"), [({"data": {"viewer": None}}, 200), ({"errors": ["no"]}, 401), ({"error": "no"}, 403)]
)
@pytest.mark.usefixtures("wandb_home")
def test_online_with_a_wrong_key_is_refused(monkeypatch: pytest.MonkeyPatch, answer: Any, status: int) -> None:
    with server(answer, status) as (address, _):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        with pytest.raises(Refused, match=f"{address}: the key was not accepted"):
            wandb_online.require_online()


@pytest.mark.usefixtures("wandb_home")
def test_online_without_a_connection_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with server({}) as (address, _):
        pass  # nobody listens there any more
    monkeypatch.setenv("WANDB_BASE_URL", address)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(Refused, match=r"not reached .*tracking.wandb=offline"):
        wandb_online.require_online()


@pytest.mark.usefixtures("wandb_home")
def test_a_server_that_does_not_answer_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_online.PROBE_TIMEOUT_S < 5
    monkeypatch.setattr(wandb_online, "PROBE_TIMEOUT_S", 0.2)
    with server({}, delay_s=1.0) as (address, _):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        with pytest.raises(Refused, match=r"no answer within 0\.2 s|timed out"):
            wandb_online.require_online()


@pytest.mark.usefixtures("wandb_home")
def test_a_name_that_is_not_resolved_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    # Looking a name up obeys no timeout of the request; here it takes until the test is over.
    over = threading.Event()

    def look_up(*_: object) -> list[Any]:
        over.wait(20)
        raise OSError("no such host")

    monkeypatch.setattr(wandb_online, "PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.example.org")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    begun = time.monotonic()
    with pytest.raises(Refused, match=r"wandb\.example\.org: no answer within 0\.2 s"):
        wandb_online.require_online()
    over.set()
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"wandb": "on"}, "tracking.wandb: got 'on', expected one of offline, online, disabled"),
        ({"wandb": True}, "tracking.wandb: got True"),
        ({"projet": "x"}, "tracking.projet: no such key; did you mean tracking.project?"),
        ({"trajectory_freq": -1}, "tracking.trajectory_freq: got -1"),
    ],
)
def test_a_wrong_tracking_key_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message.replace("?", r"\?")):
        TrackingSettings.from_config(config)


@pytest.mark.parametrize(("name", "mode"), [("wandb", "offline"), ("none", "disabled")])
def test_both_shipped_groups_are_settings(name: str, mode: str) -> None:
    from omegaconf import OmegaConf

    file = Path(__file__).parents[2] / "conf/tracking" / f"{name}.yaml"
    assert file.read_text().startswith("# @package tracking\n")
    loaded = OmegaConf.to_object(OmegaConf.load(file))
    assert isinstance(loaded, dict)
    assert TrackingSettings.from_config({str(key): value for key, value in loaded.items()}).wandb == mode
