"""Import reports of the packaged experiments: what each of their leaves means here, kept in ``golden/``.

``POIMEN_WRITE_GOLDEN=1 pytest tests/plan/test_examples.py`` writes them anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from poimen_exp.config.paths import conf_dir
from poimen_exp.solo.plan_files import compile_source, import_report
from poimen_exp.solo.plan_source import example_source

GOLDEN = Path(__file__).with_name("golden")
EXAMPLES = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml") if "verl" not in path.stem)


def summary(name: str) -> dict[str, Any]:
    """A report without values: class, target and lowering of every leaf that the experiment or the root config sets."""
    compiled = compile_source(example_source(name))
    report = import_report(compiled, "local.yaml", "0" * 64)
    given = {entry["field"]: entry for entry in report["fields"] if entry["given"]}
    return {
        "refusals": list(compiled.refusals),
        "missing": sorted(report["missing"]),
        "classes": report["classes"],
        "given": {path: [entry["class"], entry["target"], entry["lowering"]] for path, entry in sorted(given.items())},
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_report_of_a_packaged_experiment_is_the_committed_one(name: str) -> None:
    found = summary(name)
    file = GOLDEN / f"{name}.json"
    if os.environ.get("POIMEN_WRITE_GOLDEN"):
        file.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(file.read_text())
    assert found["refusals"] == []


def test_every_report_belongs_to_an_experiment() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == EXAMPLES


@pytest.mark.parametrize("name", ["quickstart", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "ppo"])
def test_an_experiment_that_ships_its_model_and_data_needs_nothing(name: str) -> None:
    assert json.loads((GOLDEN / f"{name}.json").read_text())["missing"] == []
