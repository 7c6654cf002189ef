from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from poimen_exp import app, cli
from poimen_exp.__main__ import main
from poimen_exp.config import hydra_main
from poimen_exp.errors import PoimenError, Refused, RunFailed
from poimen_exp.tracking.metrics_log import MetricsLog
from poimen_exp.tracking.run_folder import RunFolder

HEAVY = ("torch", "verl", "transformers", "wandb", "optuna", "ray", "peft")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def raising(error: BaseException) -> Callable[[DictConfig], float]:
    def call(_: DictConfig) -> float:
        raise error

    return call


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["+experiment=paper", "--cfg", "job"]], ids=" ".join)
def test_help_and_cfg_import_neither_torch_nor_verl(flags: list[str]) -> None:
    code = (
        "import sys; from poimen_exp.__main__ import main; status = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    wanted = "+experiment=dr_grpo|grpo|paper|ppo|quickstart|" if flags == ["--help"] else "alpha: 0.9"
    assert wanted in done.stdout


def test_loading_a_model_draws_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command turns it off before transformers is imported, which reads it then; one process loads a model."""
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    code = (
        "import contextlib, importlib, os, sys; sys.argv = ['poimen', '--help']\n"
        "for entry in ('poimen_exp.__main__', 'poimen_exp.cli'):\n"
        "    os.environ.pop('HF_HUB_DISABLE_PROGRESS_BARS', None)\n"
        "    with contextlib.suppress(SystemExit): importlib.import_module(entry).main()\n"
        "    assert 'HF_HUB_DISABLE_PROGRESS_BARS' in os.environ, entry\n"
        "    assert not {'huggingface_hub', 'transformers'} & sys.modules.keys(), entry\n"
        "from transformers import AutoModelForCausalLM; from poimen_exp.config.paths import asset\n"
        "AutoModelForCausalLM.from_pretrained(asset('quickstart/model'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Loading weights" not in done.stderr


def test_a_bare_command_exits_2_and_names_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-m", "poimen_exp"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for part in ("corpus.path: not set", "actor_rollout_ref.model.path: got", "+experiment=quickstart"):
        assert part in done.stderr
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["alpha=["], "no viable alternative"),
        (["alpha"], "poimen_exp: alpha: got no value, expected KEY=VALUE\n"),
        (["quickstart"], "quickstart: got no value, expected KEY=VALUE; did you mean +experiment=quickstart?"),
        (["--steps", "5"], "--steps: no such flag; expected KEY=VALUE, as trainer.total_training_steps=5"),
        (["+experiment=nope"], "experiment: got nope, expected one of dr_grpo, grpo, "),
        (["+experiment=qickstart"], "verl_smoke; did you mean experiment=quickstart?"),
        (["lora=rnk16"], "lora: got rnk16, expected one of rank16, rank32, rank4; did you mean lora=rank16?"),
        (["+experimnt=x"], "experimnt: no such key (+experimnt=x); did you mean the group +experiment?"),
        (["alpha=0.9,1.0"], "alpha: several values, expected one, or --multirun to run each"),
        (["+alpha=1"], "alpha"),
        (["--cfg", "job", "--multirun"], "expected one of --run, --multirun"),
        (["--resolve"], "--resolve: expected together with --cfg"),
        (["--experimental-rerun", "x"], "poimen resume RUN"),
        (["--config-dir", "nowhere"], "--config-dir: got nowhere, expected a folder"),
    ],
)
def test_what_does_not_compose_exits_2_with_a_message_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert list(Path().iterdir()) == []


def test_a_refused_check_leaves_no_run_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "check", raising(Refused("gate check: 1 of 9 checks failed")))
    monkeypatch.setattr(app, "run", raising(AssertionError("the run must not begin")))
    assert main(["+experiment=quickstart"]) == 2
    assert capsys.readouterr().err == "poimen_exp: gate check: 1 of 9 checks failed\n"
    assert list(Path().iterdir()) == []


def test_a_run_gets_a_folder_of_its_own_as_job_0(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DictConfig] = []
    monkeypatch.setattr(app, "check", seen.append)
    monkeypatch.setattr(app, "run", lambda cfg: seen.append(cfg) or 0.5)
    compose, composed = ConfigLoaderImpl.load_configuration, []
    monkeypatch.setattr(
        ConfigLoaderImpl, "load_configuration", lambda *given, **more: composed.append(1) or compose(*given, **more)
    )
    assert main(["+experiment=quickstart", "alpha=0.7"]) == 0
    assert len(composed) == 1  # a second time would take half a second, and could find other files
    (run,) = Path().glob("multirun/quickstart/*/0")
    assert (run / ".hydra" / "config.yaml").is_file()
    checked, ran = seen
    assert checked == ran  # what was checked is what runs
    assert (ran.alpha, "hydra" in ran) == (0.7, False)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RunFailed("three steps skipped in a row"), 1, "poimen_exp: three steps skipped in a row"),
        (Refused("adapter: no"), 2, "poimen_exp: adapter: no"),
        (KeyboardInterrupt(), 130, "poimen_exp: interrupted"),
        (ZeroDivisionError("by zero"), 1, "poimen_exp: ZeroDivisionError: by zero"),
    ],
    ids=["failed", "refused", "interrupted", "bug"],
)
def test_each_end_has_its_exit_code(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    # Hydra's own run is left out for all but one: composing is what costs.
    if isinstance(error, ZeroDivisionError | Refused):
        monkeypatch.setattr(app, "check", lambda _: None)
    else:
        monkeypatch.setattr(hydra_main, "run", lambda _argv, _check, task: task(OmegaConf.create()))
    monkeypatch.setattr(app, "run", raising(error))
    assert main(["+experiment=quickstart"]) == code
    err = capfd.readouterr().err
    assert err.splitlines()[-1] == said
    assert "Error executing job with overrides" not in err
    assert ("Traceback" in err) == (not isinstance(error, PoimenError | KeyboardInterrupt))


@pytest.mark.parametrize(
    ("more", "way"),
    [([], "poimen resume multirun/quickstart/"), (["--multirun", "alpha=0.9"], "the sweep's command again")],
    ids=["run", "sweep"],
)
def test_ctrl_c_says_where_the_run_stands_and_how_it_goes_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str], way: str
) -> None:
    def interrupted(_cfg: DictConfig, _checked: object, folder: RunFolder, resume: bool) -> None:  # noqa: ARG001
        folder.write_resolved("alpha: 0.9")
        log = MetricsLog(folder.metrics)
        for step in (0, 1, 2):
            log.append(step, {"update/skipped": 0.0}, {"update/skipped": 2})
        log.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "check", lambda _: None)
    monkeypatch.setattr(app, "_train", interrupted)
    assert main(["+experiment=quickstart", *more]) == 130
    err = capfd.readouterr().err
    assert f"stopped after step 2; go on with: {way}" in err
    assert err.endswith("poimen_exp: interrupted\n")


def test_ctrl_c_in_a_command_of_poimen_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "resume", interrupted)
    monkeypatch.setattr(sys, "argv", ["poimen", "resume", "run"])
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert capsys.readouterr().err == "poimen: interrupted\n"


def test_a_path_that_cannot_be_written_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    said = "Not a directory; expected a path that can be read and written here"
    monkeypatch.setattr(hydra_main, "run", lambda *_: (tmp_path / "file/run").mkdir())
    assert main([]) == 1
    assert capsys.readouterr().err == f"poimen_exp: {tmp_path}/file/run: {said}\n"
    monkeypatch.setattr(cli, "app", lambda: (tmp_path / "file/out").mkdir())
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err == f"poimen: {tmp_path}/file/out: {said}\n"


def test_a_file_of_an_alpha_sweep_makes_a_sweep_without_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra._internal.hydra import Hydra

    swept: list[list[str]] = []
    monkeypatch.setattr(Hydra, "multirun", lambda *arguments: swept.append(arguments[-1]))
    monkeypatch.setattr(app, "check", raising(AssertionError("a sweep checks itself")))
    assert main(["+experiment=quickstart", "+alpha_sweep=ablation"]) == 0
    assert main(["+experiment=quickstart", "--multirun", "alpha=0.9,1.0"]) == 0
    assert swept == [["+experiment=quickstart", "+alpha_sweep=ablation"], ["+experiment=quickstart", "alpha=0.9,1.0"]]


def test_plan_command_prints_json_and_exits_0_for_the_quickstart() -> None:
    from typer.testing import CliRunner

    from poimen_exp.config.compose import compose_config

    Path("run.yaml").write_text(OmegaConf.to_yaml(compose_config(["+experiment=quickstart"]), resolve=True))
    done = CliRunner().invoke(cli.app, ["plan", "run.yaml", "trainer.save_freq=5", "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["refused"] == []
    assert {entry["field"]: entry["value"] for entry in data["fields"]}["trainer.save_freq"] == 5
