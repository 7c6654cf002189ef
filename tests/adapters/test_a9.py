"""A9: an adapter that a real training run exported is mounted by a real vLLM server and answers there.

Needs the environment of ``.ci/vllm-env.sh``. One quickstart run of two steps, one server: about a minute and a half.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import takewhile
from pathlib import Path

import pytest

from poimen_exp.__main__ import main
from poimen_exp.adapters.client import Client
from poimen_exp.adapters.manifest import read_manifest
from poimen_exp.adapters.probe import load_base, probe_ids, token_log_probs
from poimen_exp.adapters.publish import base_folder, publish_adapter
from poimen_exp.adapters.read import Source, load_units, open_reader, read_document
from poimen_exp.adapters.registry import Registry
from poimen_exp.adapters.serve import PYTHON_VARIABLE, ServeOptions, serve_command
from poimen_exp.adapters.smoke import smoke
from poimen_exp.gates.types import Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NAME = "gates"
SHIPPED = Path(str(files("poimen_exp"))) / "assets" / "quickstart" / "corpus"
START_S = 420  # 20 s alone; two busy cores take several minutes
# Importing vLLM takes 15 s: no process of its own for the worker (on a CPU vLLM has one, for its threads), and none to
# look at the class of a model that the cache in the user's folder knows.
FEWER_PROCESSES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm"),
}
QUICK = (
    "+experiment=quickstart",
    "tracking=none",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.val_before_train=false",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
)


@dataclass(frozen=True)
class Mounted:
    """A published adapter and the server that has it."""

    url: str
    folder: Path
    base: Path
    registry: str


def server_python() -> tuple[Path, str | None]:
    """Python of the vLLM environment, and what is missing (None if it is there)."""
    python = Path(os.environ.get(PYTHON_VARIABLE) or Path.home() / ".cache" / "poimen-vllm" / "bin" / "python")
    missing = None if python.is_file() else f"no {python}; build it with .ci/vllm-env.sh, or set {PYTHON_VARIABLE}"
    return python, missing


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """Trains, publishes, serves; used only after ``require``."""
    folder = tmp_path_factory.mktemp("a9")
    run = train_two_steps(folder)
    registry = str(folder / "registry")
    published, _ = publish_adapter(run, NAME, Registry(registry))
    adapter = Registry(registry).fetch(NAME, published.version)
    port, base = free_port(), base_folder(adapter, None)
    limits = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512")
    options = ServeOptions({NAME: adapter}, base, server_python()[0], port=port, device="cpu", extra=limits)
    with (folder / "server.log").open("w") as log:
        command = serve_command(options)
        environment = {**os.environ, **command.environment, **FEWER_PROCESSES}
        server = subprocess.Popen(
            command.arguments, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", server, folder / "server.log")
            yield Mounted(f"http://127.0.0.1:{port}", adapter, base, registry)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def train_two_steps(folder: Path) -> Path:
    """A run of the shipped corpus and model; returns its folder."""
    with warnings.catch_warnings():  # of the libraries: a command prints them
        warnings.simplefilter("ignore")
        assert main([*QUICK, f"hydra.run.dir={folder / 'run' / '0'}"]) == 0
    return folder / "run" / "0"


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, server: subprocess.Popen, log: Path) -> None:
    stop = time.monotonic() + START_S
    while time.monotonic() < stop:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(1)
    pytest.fail(f"the server did not start in {START_S} s: {log.read_text()[-3000:]}")


@pytest.fixture
def server(require: Callable[[str, str | None], None], request: pytest.FixtureRequest) -> Mounted:
    require("vllm", server_python()[1])
    return request.getfixturevalue("mounted")


def test_a9_adapter_loads(server: Mounted) -> None:
    """A completion returns 200; log-probs differ from the base model's and equal transformers + PEFT in float32."""
    from peft import PeftModel

    client, ids = Client(server.url), probe_ids(server.base)[0].tolist()
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8)
    completion = client.complete(NAME, ids, greedy, stop_ids=())  # any status but 200 raises
    assert completion.model == NAME
    assert len(completion.ids) == 8

    base = load_base(server.base, "float32")
    expected_base = token_log_probs(base, ids).tolist()
    adapted = PeftModel.from_pretrained(base, str(server.folder)).eval()
    expected = token_log_probs(adapted, ids).tolist()
    served_base = client.prompt_log_probs(server.base.name, ids)[1]
    served = client.prompt_log_probs(NAME, ids)[1]
    assert largest(served, served_base) > 1e-2
    assert largest(served, expected) < 1e-4
    assert largest(served_base, expected_base) < 1e-4

    written = token_log_probs(adapted, [*ids, *completion.ids]).tolist()[-8:]
    assert largest(completion.log_probs, written) < 1e-4


def test_a9_the_served_adapter_is_the_trained_one(server: Mounted) -> None:
    manifest = read_manifest(server.folder)
    assert (manifest.step, manifest.label_status, manifest.version) == (2, "constructed", "v1")


def test_a9_smoke_passes_and_the_base_keeps_its_own_log_probs(server: Mounted) -> None:
    report = smoke(server.url, NAME)
    assert report.effect > 1e-2
    assert not report.leaks


def test_a9_reading_through_the_server_and_in_process_give_the_same_log_probs(server: Mounted) -> None:
    """The same prompt, and the log-probs of one model up to where greedy texts part at a near-tie, if they do."""
    units, greedy = load_units(SHIPPED / "corpus.jsonl", "p00-log0"), Sampling(0.0, 1.0, -1, 1)
    first = []
    for url in (server.url, None):
        reader = open_reader(Source(NAME, server.registry, None, url), greedy, seed=0)
        first.append(read_document(reader, units, "where is the menu log ?", lambda _: None).turns[0])
    there, here = first
    assert there.prompt == here.prompt
    pairs = zip(there.generation.ids, here.generation.ids, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    assert same > 0
    assert largest(there.generation.log_probs[:same], here.generation.log_probs[:same]) < 1e-4


def largest(one, other) -> float:
    """Largest absolute difference."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
