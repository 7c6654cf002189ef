from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from omegaconf import DictConfig
from verl_runs import POIMEN, RUN, Ended, alive, descendants, finish, lines_of, server_of, started, wait_for
from warm import Warm

from poimen_exp.config.compose import compose_config, override
from poimen_exp.tracking.run_folder import RunFolder

Smoke = Callable[..., DictConfig]


@pytest.fixture(scope="session")
def smoke() -> Smoke:
    """The CPU experiment of the verl backend with overrides; composed once."""
    composed = compose_config(["+experiment=verl_smoke"])

    def compose(*overrides: str) -> DictConfig:
        return override(composed, overrides)

    return compose


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Three steps on verl, Ray and all. Never skipped: verl is a dependency, and Ray comes with it."""
    missing = [name for name in ("verl", "ray", "transfer_queue") if find_spec(name) is None]
    assert not missing, f"not installed: {', '.join(missing)}; uv sync"
    path = tmp_path_factory.mktemp("verl") / "run"
    more = ("tracking.wandb=disabled", "actor_rollout_ref.actor.optim.lr=2e-3", f"hydra.run.dir={path}")
    done = finish(*RUN, "+experiment=verl_smoke", *more, path=path)
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.fixture(scope="session")
def killed(trained: Ended, warm_python: Warm) -> Ended:
    """A copy of ``trained`` gone on with for many steps; its sampling server was killed behind step 4's checkpoint.

    Its processes are warm: those of ``trained``, which import verl on their own, have shown that they do.
    """
    folder = RunFolder(trained.folder.path.with_name("killed"), None)
    shutil.copytree(trained.folder.path, folder.path)
    output = folder.path.with_name("output")
    arguments = ("resume", str(folder.path), "trainer.total_training_steps=200")
    command = (str(warm_python.python), *POIMEN, *arguments)
    with started(*command, output=output, more=warm_python.for_ray()) as process:
        wait_for(process, folder.checkpoint(4) / "manifest.json")
        everyone = [*descendants(process), *warm_python.processes()]
        server_of(everyone).kill()
        begun = time.monotonic()
        code = process.wait(timeout=300)
        seconds = time.monotonic() - begun
        left = alive(everyone, wait_s=20)
    return Ended(folder, code, output.read_text(), lines_of(folder.path), seconds, left)


@pytest.fixture(scope="session")
def finished(killed: Ended, warm_python: Warm) -> Ended:
    """The killed run brought to its end at the checkpoint it has: nothing is left to train."""
    path = killed.folder.path
    command = (str(warm_python.python), *POIMEN, "resume", str(path), "trainer.total_training_steps=4")
    done = finish(*command, path=path)
    assert done.code == 0, done.output[-6000:]
    return done
