"""The serve command, the smoke test against a fake server, merging, and the command line."""

from __future__ import annotations

import json
import shlex
import shutil
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from poimen_exp.adapters.export import export_adapter
from poimen_exp.adapters.merge import TOLERANCE, merge_adapter
from poimen_exp.adapters.serve import ServeOptions, find_server_python, pick_server_device, serve_command
from poimen_exp.adapters.smoke import smoke
from poimen_exp.cli import app, main
from poimen_exp.errors import Refused, RunFailed
from poimen_exp.gates.types import Generation

from .conftest import make_info, make_peft, make_tiny_model, train
from .fake_server import FakeServer, serving

PYTHON = Path("/opt/vllm/bin/python")


def values_of(arguments: tuple[str, ...], option: str) -> list[str]:
    """The words behind an option, up to the next one."""
    start = arguments.index(option) + 1
    stop = next((i for i in range(start, len(arguments)) if arguments[i].startswith("--")), len(arguments))
    return list(arguments[start:stop])


def test_the_command_has_a_spare_slot_the_rank_the_type_and_the_modules(adapter: Path, base: Path, tmp_path) -> None:
    wide = make_peft(base, rank=9)
    train(wide, base)
    other = export_adapter(wide, tmp_path / "other", make_info(base))
    command = serve_command(ServeOptions({"one": adapter, "two": other}, base, PYTHON, port=8123))
    arguments = command.arguments
    assert arguments[:3] == (str(PYTHON), "-m", "vllm.entrypoints.openai.api_server")
    assert values_of(arguments, "--max-loras") == ["3"]
    assert values_of(arguments, "--max-lora-rank") == ["16"]  # rank 9: the next that vLLM allows
    assert values_of(arguments, "--dtype") == ["float32"]
    assert values_of(arguments, "--lora-modules") == [f"one={adapter}", f"two={other}"]
    assert values_of(arguments, "--generation-config") == ["vllm"]
    assert values_of(arguments, "--model") == [str(base)]
    assert values_of(arguments, "--max-model-len") == [str(40 + 32 + 64 + 512)]
    assert (values_of(arguments, "--host"), values_of(arguments, "--port")) == (["127.0.0.1"], ["8123"])
    assert "--enable-lora" in arguments
    assert "--enforce-eager" not in arguments


@pytest.mark.parametrize(("own", "expected"), [(None, "0"), ("1", "1")])
def test_a_server_compiles_no_sampler_unless_it_is_told_to(
    adapter: Path, base: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, expected: str
) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    if own is not None:
        monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", own)
    command = serve_command(ServeOptions({"one": adapter}, base, PYTHON, device="cuda"))
    assert command.environment["VLLM_USE_FLASHINFER_SAMPLER"] == expected


def test_a_cpu_server_runs_eagerly_with_its_own_environment(adapter: Path, base: Path) -> None:
    command = serve_command(ServeOptions({"one": adapter}, base, PYTHON, device="cpu", extra=("--max-num-seqs", "4")))
    assert "--enforce-eager" in command.arguments
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert command.arguments[-2:] == ("--max-num-seqs", "4")
    words = shlex.split(command.as_shell())
    assert tuple(words[len(command.environment) :]) == command.arguments


def test_the_length_stays_within_the_positions_of_the_model(base: Path, trained, tmp_path: Path) -> None:
    long = export_adapter(trained, tmp_path / "long", make_info(base, chunk_tokens=5000))
    arguments = serve_command(ServeOptions({"one": long}, base, PYTHON)).arguments
    assert values_of(arguments, "--max-model-len") == ["2048"]


def test_a_broken_adapter_or_two_types_are_not_served(adapter: Path, base: Path, trained, tmp_path: Path) -> None:
    half = export_adapter(trained, tmp_path / "half", make_info(base, dtype="bfloat16"))
    with pytest.raises(Refused, match="bfloat16 and in float32"):
        serve_command(ServeOptions({"one": adapter, "two": half}, base, PYTHON))
    with pytest.raises(Refused, match="expected the same weights"):
        serve_command(ServeOptions({"one": adapter}, make_tiny_model(tmp_path / "other", seed=7), PYTHON))
    with pytest.raises(Refused, match="--max-loras=1 is set here from the adapters"):
        serve_command(ServeOptions({"one": adapter}, base, PYTHON, extra=("--max-loras=1",)))
    with pytest.raises(Refused, match="no adapter named"):
        serve_command(ServeOptions({}, base, PYTHON))


def test_a_python_without_vllm_is_told_how_to_get_one(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POIMEN_VLLM_PYTHON", str(tmp_path / "python"))
    with pytest.raises(Refused, match="POIMEN_VLLM_PYTHON: no file"):
        find_server_python()
    monkeypatch.delenv("POIMEN_VLLM_PYTHON")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("poimen_exp.adapters.serve.find_spec", lambda _: None)
    with pytest.raises(Refused, match=r"uv sync --extra vllm.*POIMEN_VLLM_PYTHON"):
        find_server_python()
    assert pick_server_device("cuda") == "cuda"


# Smoke


def fake(**changes) -> FakeServer:
    """Serves ``gates`` over ``base``: log-probs -1 and -1.5."""
    server = FakeServer(lambda *_: Generation((5, 6), (-1.0, -1.0), clipped=True))
    server.prompt_log_probs = lambda model, prompt: [-1.5 if model == "gates" else -1.0] * (len(prompt) - 1)
    for name, value in changes.items():
        setattr(server, name, value)
    return server


def test_a_good_server_passes_with_the_effect_measured() -> None:
    with serving(fake()) as server:
        report = smoke(server.url + "/v1", "gates")
    assert (report.base, report.adapter, report.completion_tokens, report.leaks) == ("base", "gates", 2, False)
    assert report.effect == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {"base": None}}, "no model 'gates'; it serves base"),
        ({"models": {"base": None, "gates": None}}, "'gates' is a base model there"),
        ({"answers_as": lambda _: "base"}, "asked gates, base answered"),
        ({"prompt_log_probs": lambda _, prompt: [-1.0] * (len(prompt) - 1)}, "the adapter has no effect there"),
    ],
)
def test_a_server_that_does_not_serve_the_adapter_fails(changes, message: str) -> None:
    with serving(fake(**changes)) as server, pytest.raises(RunFailed, match=message):
        smoke(server.url, "gates")


def test_a_server_that_gives_base_requests_the_adapter_in_a_batch_is_found_out() -> None:
    """The trap of --max-loras 1: alone the base is right, beside an adapter's request it is not."""
    running, lock, together = 0, threading.Lock(), threading.Event()

    def leaking(model: str, prompt) -> list[float]:
        nonlocal running
        with lock:
            running += 1
            if running > 1:
                together.set()
        leak = together.wait(timeout=0.3)  # long enough for the other requests of a batch to arrive
        with lock:
            running -= 1
        return [-1.5 if model == "gates" or leak else -1.0] * (len(prompt) - 1)

    with serving(fake(prompt_log_probs=leaking)) as server:
        assert smoke(server.url, "gates").leaks
        together.clear()
        result = CliRunner().invoke(app, ["adapter", "smoke", server.url, "gates"])
    assert result.exit_code == 1
    assert "--max-loras one more than adapters" in result.output


# Merge


def test_a_merged_model_has_the_logits_of_base_plus_adapter(adapter: Path, base: Path, trained, tmp_path) -> None:
    report = merge_adapter(adapter, base, tmp_path / "merged", "float32")
    merged = AutoModelForCausalLM.from_pretrained(report.folder)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, got = trained(input_ids=ids).logits, merged(input_ids=ids).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits
    assert float((got - expected).abs().max()) < 1e-4
    assert float((plain - expected).abs().max()) > 0.1
    assert report.difference <= report.tolerance == pytest.approx(1e-4 * 10, rel=10)
    assert AutoTokenizer.from_pretrained(report.folder).chat_template is not None


def test_a_merge_to_bfloat16_is_stored_in_it_within_its_own_tolerance(adapter: Path, base: Path, tmp_path) -> None:
    report = merge_adapter(adapter, base, tmp_path / "merged", "bfloat16")
    config = json.loads((report.folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert 0 < report.difference <= report.tolerance


def test_a_merge_that_would_round_the_adapter_away_is_refused(base: Path, tmp_path: Path) -> None:
    """B of 1e-6: its effect on the logits is far below one step of bfloat16."""
    model = make_peft(base)
    for key, value in model.named_parameters():
        if "lora_B" in key:
            value.data.fill_(1e-6)
    folder = export_adapter(model, tmp_path / "faint", make_info(base))
    assert merge_adapter(folder, base, tmp_path / "merged32", "float32").difference < 1e-4
    with pytest.raises(RunFailed, match=r"adapter itself changes them by .*--dtype float32"):
        merge_adapter(folder, base, tmp_path / "merged16", "bfloat16")


def test_a_merge_outside_the_tolerance_leaves_nothing(adapter: Path, base: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(TOLERANCE, "bfloat16", 1e-9)
    with pytest.raises(RunFailed, match="logits of the merged bfloat16 model differ"):
        merge_adapter(adapter, base, tmp_path / "merged", "bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    with pytest.raises(Refused, match="exists already"):
        merge_adapter(adapter, base, adapter, "float32")


# The command line


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["adapter", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_publish_list_show_verify_and_print_the_serve_command(adapter: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("POIMEN_REGISTRY", str(tmp_path / "registry"))
    python = shutil.copy("/bin/true", tmp_path / "python")
    monkeypatch.setenv("POIMEN_VLLM_PYTHON", str(python))
    assert "published gates@v1 at" in run("publish", adapter, "--name", "gates")
    run("publish", adapter, "--name", "gates")
    assert "v2" in run("list")
    assert json.loads(run("show", "gates@v1"))["version"] == "v1"
    assert "a reload gives equal logits" in run("verify", "gates")
    shown = run("serve", "gates", "--print", "--device", "cpu", "--max-num-seqs", "4")
    assert f"--lora-modules gates={tmp_path}/registry/gates/v2 --enforce-eager --max-num-seqs 4" in shown
    assert shown.count("\n") == 1


def test_list_says_that_there_is_nothing(tmp_path: Path, monkeypatch) -> None:
    assert run("list", "--registry", tmp_path) == f"no adapters in {tmp_path}\n"
    monkeypatch.chdir(tmp_path)
    assert run("list") == "no adapters in adapters\n"  # the default, which nobody named
    for arguments, environment in ((["--registry", "adapters"], {}), ([], {"POIMEN_REGISTRY": "nowhere"})):
        with pytest.raises(Refused, match=r"registry (adapters|nowhere): there is no such folder"):
            CliRunner(env=environment).invoke(app, ["adapter", "list", *arguments], catch_exceptions=False)


def test_a_server_without_a_scheme_is_refused() -> None:
    with pytest.raises(Refused, match=r"server '127\.0\.0\.1:8000': expected http://host:port"):
        run("smoke", "127.0.0.1:8000", "gates")


def test_export_copies_or_merges(adapter: Path, base: Path, tmp_path: Path) -> None:
    run("export", adapter, tmp_path / "copy")
    assert (tmp_path / "copy" / "poimen.json").read_bytes() == (adapter / "poimen.json").read_bytes()
    assert "tolerance" in run("export", adapter, tmp_path / "merged", "--merge", "--base", base)
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_verify_says_what_it_could_not_check(base: Path, tmp_path: Path, trained) -> None:
    moved = shutil.copytree(base, tmp_path / "moved")
    folder = export_adapter(trained, tmp_path / "a", make_info(moved))
    run("publish", folder, "--name", "gates", "--registry", tmp_path / "registry")
    shutil.rmtree(moved)
    arguments = ["adapter", "verify", "gates", "--registry", str(tmp_path / "registry")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "NOT checked" in result.output
    assert "effect: log-probs" in run(*arguments[1:], "--base", base)


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["poimen", "adapter", "publish", str(tmp_path), "--name", "x"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"poimen: {tmp_path}: no adapter there")
