"""``poimen corpus ...`` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from poimen_exp.cli import app
from poimen_exp.corpus import load_manifest
from poimen_exp.errors import CorpusError, Refused

from .support import labelled, three_projects, write
from .test_agreement import lines, random_pair
from .test_convert import HOTPOT, write_lines

RUNNER = CliRunner()


def run(*arguments: Any) -> str:
    result = RUNNER.invoke(app, ["corpus", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_convert_check_stats_and_split_of_a_set(tmp_path: Path) -> None:
    out = tmp_path / "c"
    assert "20 rows" in run("convert", "hotpotqa", write_lines(tmp_path / "h.json", HOTPOT), out, "--tokens", 200)
    assert "0 problems" in run("check", out, "--chunk-tokens", 100)
    stats = json.loads(run("stats", out, "--chunk-tokens", 100, "--json"))
    assert (stats["trajectories"], stats["documents"], stats["projects"]) == (10, 10, 5)
    assert stats["sides"] == {"train": [3, 6], "val": [1, 2], "test": [1, 2]}
    read = run("stats", out, "--chunk-tokens", 100)
    assert "  train: 3 projects, 6 trajectories\n  val: 1 project, 2 trajectories\n" in read
    assert not set(read) & set("{}()[]")  # no raw tuples, mappings or lists
    sides = json.loads(run("split", out, "--json"))
    assert {side: len(projects) for side, projects in sides.items()} == {"train": 3, "val": 1, "test": 1}
    assert sum(sum(projects.values()) for projects in sides.values()) == 10


def test_check_exits_with_2_and_lists_problems(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", three_projects())
    result = RUNNER.invoke(app, ["corpus", "check", str(folder), "--max-chunks", "2", "--json"])
    assert result.exit_code == 2
    assert json.loads(result.output)["n_problems"] == 3
    result = RUNNER.invoke(app, ["corpus", "check", str(tmp_path)])
    assert result.exit_code == 2
    assert "manifest.json: not found" in result.output
    file = folder / "corpus.jsonl"
    result = RUNNER.invoke(app, ["corpus", "check", str(file)])
    assert result.exit_code == 2
    assert f"{file}:1: got a file, expected a folder with a manifest.json and *.jsonl files" in result.output


def test_what_was_not_measured_has_a_dash_in_the_table(tmp_path: Path) -> None:
    shown = run("check", write(tmp_path / "c", three_projects()))
    rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines() if line.startswith("│")]
    cells = {row[1]: row[3] for row in rows}
    assert (cells["position leak: evidence"], cells["answer in evidence-free chunks"], cells["never"]) == (
        "-",
        "-",
        "ok",
    )


def test_one_project_is_no_plural(tmp_path: Path) -> None:
    assert "  train: 1 project, 1 trajectory: p2\n" in run("split", write(tmp_path / "c", three_projects()))


@pytest.mark.parametrize("command", ["check", "stats", "split", "agreement", "convert"])
def test_help_names_everything_whole_at_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(command, "--help")
    assert max(map(len, shown.splitlines())) == 80
    assert "…" not in shown
    assert "--no-" not in shown


def test_check_writes_json_and_a_page(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", three_projects())
    report = json.loads(run("check", folder, "--json", "--html", tmp_path / "p.html"))
    assert {audit["name"] for audit in report["audits"]} >= {"position leak: evidence", "text shared across the split"}
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


def test_own_lines_must_be_measured_before_they_are_loaded(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "own.jsonl", [{"id": f"t{n}", "p": f"p{n}", "q": "?", "c": ["x"]} for n in range(3)]
    )
    arguments = ["--map", "trajectory_id=id", "--map", "project=p", "--map", "question=q", "--map", "chunks=c"]
    assert "poimen corpus agreement" in run("convert", "--from", "jsonl", source, tmp_path / "c", *arguments)
    with pytest.raises(CorpusError, match="labels by labelers need a measured agreement"):
        load_manifest(tmp_path / "c")
    run("convert", "jsonl", source, tmp_path / "c", *arguments, "--constructed", "--overwrite")
    assert load_manifest(tmp_path / "c").label_status == "constructed"


def test_agreement_prints_a_block_that_the_loader_takes(tmp_path: Path) -> None:
    rows, others = random_pair(5)
    corpus = [labelled(row["trajectory_id"], row["project"], row["evidence"]) for row in rows]
    first, second = lines(tmp_path / "ann.jsonl", rows), lines(tmp_path / "bob.jsonl", others)
    text = run("agreement", first, second, "--design", "independent_blind", "--out", tmp_path / "labels.json")
    assert "kappa: 0." in text
    assert "95 % by project" in text
    folder = write(tmp_path / "c", corpus, labels=json.loads((tmp_path / "labels.json").read_text()))
    assert load_manifest(folder).update.agreement.labelers == ("ann", "bob")  # type: ignore[union-attr]
    assert "a run would refuse this" not in text


def test_agreement_says_what_a_run_would_refuse_in_its_block(tmp_path: Path) -> None:
    rows, others = random_pair(5)
    files = [str(lines(tmp_path / "ann.jsonl", rows)), str(lines(tmp_path / "bob.jsonl", others))]
    result = RUNNER.invoke(app, ["corpus", "agreement", *files, "--json"])
    assert result.exit_code == 0
    said = result.stderr.splitlines()
    assert [line.split(":")[1].strip() for line in said] == [
        f"labels.{gate}.agreement.design" for gate in ("update", "exit")
    ]
    assert all(line.startswith("a run would refuse this: ") for line in said)
    assert json.loads(result.stdout)["update"]["agreement"]["design"] == "not stated"
    flipped = [row | {"evidence": [not label for label in row["evidence"]]} for row in rows]
    worst = lines(tmp_path / "eve.jsonl", flipped)
    result = RUNNER.invoke(app, ["corpus", "agreement", files[0], str(worst), "--design", "independent_blind"])
    assert "is below corpus.min_kappa = 0.6" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "hotpotqa", "x"], "expected SET INPUT OUT"),
        (["convert", "squad", "x", "y"], "got 'squad', expected hotpotqa"),
        (["convert", "locomo", "x", "y", "--map", "a=b"], "--map: only for jsonl"),
        (["convert", "qmsum", "x", "y", "--documents", "2"], "--documents: only for hotpotqa and musique, got qmsum"),
        (["convert", "locomo", "x", "y", "--tokens", "9"], "--tokens: only for hotpotqa and musique, got locomo"),
        (["convert", "jsonl", "x", "y", "--projects", "9"], "--projects: only for hotpotqa and musique, got jsonl"),
        (["convert", "qmsum", "x", "y", "--tokenizer", "m"], "--tokenizer: only for hotpotqa and musique, got qmsum"),
        (["convert", "locomo", "x", "y", "--constructed"], "--constructed: only for jsonl, got locomo"),
        (["convert", "jsonl", "x", "y", "--documents", "2"], "--documents: only for hotpotqa and musique, got jsonl"),
        (["check", "x", "--tokenizer", "nowhere"], "got no tokenizer.json there"),
        (["check", "x", "--max-prompt-length", "9"], "expected a model folder"),
        (["agreement", "nowhere.jsonl", "b"], r"nowhere\.jsonl:1: not found"),
        (["agreement", "a/x.jsonl", "b/X.jsonl"], r"got labelers \['x', 'X'\], expected two different ones"),
    ],
)
def test_a_wrong_command_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        RUNNER.invoke(app, ["corpus", *arguments], catch_exceptions=False)


def test_the_corpus_package_imports_no_heavy_library() -> None:
    code = (
        "import sys, poimen_exp.corpus, poimen_exp.cli.corpus;"
        "print([m for m in ('torch', 'transformers', 'verl', 'sklearn', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
