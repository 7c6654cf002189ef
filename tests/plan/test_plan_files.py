"""``poimen plan CONFIG --out LOCAL.yaml``: a configuration that runs, or a template that does not, and the report."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from poimen_exp.config.tree import verl_tree
from poimen_exp.errors import Refused
from poimen_exp.solo.plan import compile_settings
from poimen_exp.solo.plan_files import compile_source, write_plan_files
from poimen_exp.solo.plan_source import file_source, load_config
from poimen_exp.solo.rules_table import OWN

from .support import CORPUS, poimen, verl_file

LONGEST = "actor_rollout_ref.rollout.max_model_len"


def report_of(path: Path) -> dict[str, dict[str, object]]:
    return {entry["field"]: entry for entry in json.loads(path.read_text())["fields"]}


def test_the_local_configuration_plans_again_with_the_settings_of_its_source(tmp_path: Path) -> None:
    compiled = compile_source(file_source(verl_file(tmp_path)))
    local, _ = write_plan_files(compiled, tmp_path / "local.yaml", force=False)
    settings, _ = compile_settings(load_config(local))
    assert settings == compile_settings(load_config(verl_file(tmp_path)), placement="report")[0]
    assert (settings.rollout.group_size, settings.step.train_batch_size) == (4, 8)


def test_a_run_takes_the_local_configuration_and_not_its_source(tmp_path: Path) -> None:
    source = verl_file(tmp_path)
    with pytest.raises(Refused, match=r"trainer\.nnodes: got 4, expected 1"):
        compile_settings(load_config(source))
    local, _ = write_plan_files(compile_source(file_source(source)), tmp_path / "local.yaml", force=False)
    again = compile_source(file_source(local))
    assert (again.refusals, again.missing, again.changed) == ((), {}, {})


def test_the_report_has_every_leaf_with_its_source_and_local_value(tmp_path: Path) -> None:
    source = verl_file(tmp_path)
    local, report = write_plan_files(compile_source(file_source(source)), tmp_path / "local.yaml", force=False)
    head, fields = json.loads(report.read_text()), report_of(report)
    assert report.name == "local.import-report.json"
    assert head["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert head["local_sha256"] == hashlib.sha256(local.read_bytes()).hexdigest()
    assert fields.keys() >= verl_tree().leaves.keys() | OWN.keys()
    assert sum(head["classes"].values()) == len(fields)
    assert fields["data.train_batch_size"] == {
        "field": "data.train_batch_size",
        "given": True,
        "source_value": 8,
        "local_value": 8,
        "target": "step.train_batch_size",
        "class": "exact",
        "reason": "read as verl reads it",
        "lowering": None,
    }
    assert fields["data.shuffle"]["given"] is False


def test_what_places_work_on_a_cluster_is_lowered_to_one_device_and_said(tmp_path: Path) -> None:
    _, report = write_plan_files(compile_source(file_source(verl_file(tmp_path))), tmp_path / "l.yaml", force=False)
    fields = report_of(report)
    nodes, longest, engine = fields["trainer.nnodes"], fields[LONGEST], fields["actor_rollout_ref.rollout.name"]
    assert (nodes["source_value"], nodes["local_value"], nodes["class"]) == (4, 1, "distributed_only")
    assert nodes["lowering"] == "4 becomes 1: it has no part on one device"
    assert (longest["source_value"], longest["local_value"]) == (4096, None)
    assert (engine["class"], engine["local_value"]) == ("locally_lowered", "vllm")
    assert "in this process" in str(engine["lowering"])


def test_a_key_of_verls_classes_alone_is_left_out_of_the_local_configuration(tmp_path: Path) -> None:
    path = "ray_kwargs.ray_init.num_gpus"
    source = verl_file(tmp_path, {path: 8})
    local, report = write_plan_files(compile_source(file_source(source)), tmp_path / "l.yaml", force=False)
    assert "num_gpus" not in local.read_text()
    assert str(report_of(report)[path]["lowering"]).startswith("8 becomes None")


def test_files_that_are_there_stay_as_they_are_without_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_source(file_source(verl_file(tmp_path)))
    out = tmp_path / "local.yaml"
    report = tmp_path / "local.import-report.json"
    report.write_text("mine")
    with pytest.raises(Refused, match=r"local\.import-report\.json: there already; expected a new name, or --force"):
        write_plan_files(compiled, out, force=False)
    assert (report.read_text(), out.exists()) == ("mine", False)
    write_plan_files(compiled, out, force=True)
    assert "schema" in json.loads(report.read_text())
    assert poimen(monkeypatch, "plan", str(verl_file(tmp_path)), "--out", str(out)) == 2


def test_a_source_without_model_and_corpus_becomes_a_template_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = verl_file(tmp_path, {"corpus.path": None, "actor_rollout_ref.model.path": "Qwen/Qwen2.5-3B-Instruct"})
    assert poimen(monkeypatch, "plan", str(source), "--out", str(tmp_path / "local.yaml")) == 2
    said = capsys.readouterr().err
    assert "2 values to fill in" in said
    assert "corpus.path: got '???'" in said
    assert "actor_rollout_ref.model.path: got 'Qwen/Qwen2.5-3B-Instruct', expected: folder of a downloaded" in said
    template = tmp_path / "local.template.yaml"
    assert template.exists()
    assert not (tmp_path / "local.yaml").exists()
    fields = report_of(tmp_path / "local.import-report.json")
    assert fields["corpus.path"]["local_value"] is None
    for command in ("plan", "run"):
        assert poimen(monkeypatch, command, str(template)) == 2
        assert "a template, which does not run: 2 values to fill in" in capsys.readouterr().err


def test_a_template_that_is_filled_in_becomes_a_configuration(tmp_path: Path) -> None:
    source = verl_file(tmp_path, {"corpus.path": None})
    template, _ = write_plan_files(compile_source(file_source(source)), tmp_path / "a.yaml", force=False)
    filled = compile_source(file_source(template, [f"corpus.path={CORPUS}"]))
    local, _ = write_plan_files(filled, tmp_path / "b.yaml", force=False)
    assert local.name == "b.yaml"
    assert str(compile_settings(load_config(local))[0].corpus.path) == CORPUS  # type: ignore[union-attr]


def test_prompts_without_a_reward_become_a_template_that_names_it(tmp_path: Path) -> None:
    changes = {"algorithm.adv_estimator": "grpo", "corpus.path": None, "trainer.total_training_steps": None}
    compiled = compile_source(file_source(verl_file(tmp_path, changes)))
    assert compiled.refusals == ()
    assert set(compiled.missing) == {"data.train_files", "data.val_files", "rewards.provider"}
    steps = next(entry.refusal for entry in compiled.plan if entry.field == "trainer.total_training_steps")
    assert steps is not None
    assert steps.startswith(
        "trainer.total_training_steps: got None, expected Parquet files that can be read as data.train_files: their "
        "rows and trainer.total_epochs give the steps; set the files, or trainer.total_training_steps to a number "
        "(expected Parquet files that exist: "
    )


def test_a_verl_file_without_engine_and_rank_becomes_a_template_that_names_the_rank(tmp_path: Path) -> None:
    name, rank = "actor_rollout_ref.rollout.name", "actor_rollout_ref.model.lora_rank"
    compiled = compile_source(file_source(verl_file(tmp_path, {name: None, rank: None})))
    assert (compiled.refusals, set(compiled.missing)) == ((), {rank})
    template, _ = write_plan_files(compiled, tmp_path / "a.yaml", force=False)
    settings, _ = compile_settings(load_config(template, [f"{rank}=16"]))
    assert (settings.rollout.engine, settings.model.lora_rank) == ("vllm", 16)


def test_a_changed_objective_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    changes = {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo", "corpus.path": None}
    compiled = compile_source(file_source(verl_file(tmp_path, changes)))
    with pytest.raises(Refused, match=r"nothing was written:\nactor_rollout_ref\.actor\..*loss_mode: got 'gspo'"):
        write_plan_files(compiled, tmp_path / "local.yaml", force=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.yaml"]


FOREIGN = [
    ({"data.train_bach_size": 8}, "data.train_bach_size: not in verl 0.9.1's tree.*did you mean data.train_batch_size"),
    ({"trainer.rollout_mode": "x"}, "trainer.rollout_mode: not in verl 0.9.1's tree, and none of our keys"),
    ({"data.seed": "${trainer.sed}"}, r"data.seed: got \$\{trainer.sed\}, expected a value or a key that exists"),
]


@pytest.mark.parametrize(("changes", "message"), FOREIGN, ids=["misspelt", "another-version", "interpolation"])
def test_a_source_of_another_tree_is_refused_by_its_keys(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        file_source(verl_file(tmp_path, changes))


def test_every_key_that_differs_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        file_source(verl_file(tmp_path, {"data.one": 1, "trainer.two": 2}))
    assert [line.split(":")[0] for line in str(refused.value).splitlines()[1:]] == ["data.one", "trainer.two"]
