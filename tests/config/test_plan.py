from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from omegaconf import DictConfig, OmegaConf

from poimen_exp.config.compose import override
from poimen_exp.config.schema import own_keys, typed_keys
from poimen_exp.config.tree import resolved, verl_tree
from poimen_exp.errors import Refused
from poimen_exp.solo.plan import compile_settings, nested_settings, plan_fields, plan_json, rule_of
from poimen_exp.solo.plan_report import PlanRequest, report_plan
from poimen_exp.solo.plan_source import file_source, load_config
from poimen_exp.solo.rules import Disposition
from poimen_exp.solo.rules_table import OWN, RULES
from poimen_exp.solo.settings import SoloSettings

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))


def changed(cfg: DictConfig, *overrides: str) -> DictConfig:
    return override(cfg, overrides)


def refusal(cfg: DictConfig, *overrides: str) -> str:
    with pytest.raises(Refused) as refused:
        compile_settings(changed(cfg, *overrides))
    return str(refused.value)


def setting(settings: Any, path: str) -> Any:
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings


def leaf_fields(kind: Any, prefix: str = "") -> list[str]:
    found = []
    for name, hint in get_type_hints(kind).items():
        nested = nested_settings(hint)
        found += [f"{prefix}{name}"] if nested is None else leaf_fields(nested, f"{prefix}{name}.")
    return found


def test_the_paper_compiles_for_one_device_as_it_is(paper: DictConfig) -> None:
    settings, plan = compile_settings(paper)
    assert (settings.alpha, settings.rollout.group_size, settings.optim.lr) == (0.9, 16, 1e-6)
    assert (settings.loss.use_kl_loss, settings.loss.kl_loss_type) == (True, "low_var_kl")
    assert (settings.model.lora_rank, settings.model.dtype, settings.model.attn_implementation) == (
        16,
        "bfloat16",
        "sdpa",
    )
    assert all(entry.refusal is None for entry in plan)


def test_every_leaf_of_verl_and_every_key_that_solo_reads_is_in_the_plan_with_one_of_seven_dispositions(
    paper: DictConfig,
) -> None:
    _, plan = compile_settings(paper)
    names = [entry.field for entry in plan]
    assert len(names) == len(set(names))
    assert set(names) >= set(verl_tree().leaves) | set(OWN)
    assert {entry.disposition for entry in plan} <= set(get_args(Disposition))
    assert [entry.field for entry in plan if entry.disposition == "unsupported"] == []
    assert all(entry.reason for entry in plan)


def test_every_rule_matches_a_leaf() -> None:
    used = {rule_of(path).pattern for path in verl_tree().leaves}
    assert [rule.pattern for rule in RULES if rule.pattern not in used] == []


def test_every_setting_is_fed_by_exactly_the_rules_and_our_keys() -> None:
    fed = [target for rule in RULES for target in rule.targets] + list(OWN.values())
    assert sorted(fed) == sorted(leaf_fields(SoloSettings))


def test_our_keys_that_do_not_feed_solo_are_those_of_other_parts() -> None:
    others = {key.split(".")[0] for key in own_keys() - set(OWN)}
    assert others == {"backend", "tracking", "adapter", "sweep", "rollout"}
    assert {key for key in own_keys() - set(OWN) if key.startswith("rollout.")} == {
        "rollout.turn_timeout_s",
        "rollout.stall_timeout_s",
    }


OWN_OTHER: dict[str, tuple[str, Any]] = {
    "alpha": ("0.5", 0.5),
    "seed": ("7", 7),
    "device": ("cpu", "cpu"),
    "corpus.path": ("elsewhere", Path("elsewhere")),
    "corpus.chunk_tokens": ("9", 9),
    "corpus.max_chunks": ("9", 9),
    "corpus.min_kappa": ("0.7", 0.7),
    "corpus.allow_unmeasured": ("true", True),
    "corpus.on_too_long": ("drop", "drop"),
    "corpus.split_seed": ("9", 9),
    "corpus.val_fraction": ("0.2", 0.2),
    "corpus.test_fraction": ("0.2", 0.2),
    "corpus.max_val_tasks": ("9", 9),
    "gates.layout": ("chunk_first", "chunk_first"),
    "gates.wording": ("terse", "terse"),
    "gates.memory_tokens": ("9", 9),
    "gates.on_unparsed": ("zero_format", "zero_format"),
    "gates.matcher": ("f1", "f1"),
    "gates.warm_start.steps": ("9", 9),
    "gates.warm_start.lr": ("0.5", 0.5),
    "gates.warm_start.batch": ("9", 9),
    "advantage.turn_baseline": ("batch_step", "batch_step"),
    "rollout.max_failed": ("0.5", 0.5),
    "stop.patience": ("null", None),
    "stop.min_delta": ("0.5", 0.5),
    "stop.on_collapse": ("stop", "stop"),
    "adapter.weights": ("last", "last"),
    "reference.adapter": ("elsewhere", Path("elsewhere")),
}


def test_a_key_of_ours_changes_its_setting(paper: DictConfig) -> None:
    assert OWN_OTHER.keys() | {"rewards.provider"} == OWN.keys()  # prompts': refused for the gates
    before, _ = compile_settings(paper)
    after, _ = compile_settings(changed(paper, *(f"{key}={line}" for key, (line, _) in OWN_OTHER.items())))
    for key, (_, expected) in OWN_OTHER.items():
        assert setting(before, OWN[key]) != expected, key
        assert setting(after, OWN[key]) == expected, key


def test_greedy_validation_is_temperature_0(paper: DictConfig) -> None:
    settings, _ = compile_settings(changed(paper, f"{_ROLLOUT}.val_kwargs.do_sample=false"))
    assert settings.rollout.val.temperature == 0.0
    assert settings.rollout.train.temperature == 1.0


def test_warm_up_is_the_count_where_it_is_above_0(paper: DictConfig) -> None:
    lines = [f"{_ACTOR}.optim.lr_warmup_steps_ratio=0.05", "trainer.total_training_steps=300"]
    with_count, _ = compile_settings(changed(paper, *lines))
    assert with_count.optim.lr_warmup_steps == 20  # and not 0.05 of 300


def test_float32_is_read_and_must_hold_for_rollout_and_reference_too(paper: DictConfig) -> None:
    line = f"{_ACTOR}.fsdp_config.dtype=float32"
    message = refusal(paper, line)
    assert f"{_ROLLOUT}.dtype: got 'bfloat16', expected 'float32', the value of {_ACTOR}.fsdp_config.dtype" in message
    assert "actor_rollout_ref.ref.fsdp_config.dtype" in message
    rest = [f"{_ROLLOUT}.dtype=float32", "actor_rollout_ref.ref.fsdp_config.dtype=float32"]
    settings, _ = compile_settings(changed(paper, line, *rest))
    assert settings.model.dtype == "float32"


def test_attention_is_sdpa_where_nothing_is_chosen(paper: DictConfig) -> None:
    cfg = paper.copy()
    cfg.actor_rollout_ref.model.override_config = {}
    assert compile_settings(cfg)[0].model.attn_implementation == "sdpa"


def test_an_adapter_to_start_from_is_read(paper: DictConfig, tmp_path: Path) -> None:
    line = f"{_MODEL}.lora_adapter_path={tmp_path}"
    assert "it has no adapter_config.json" in refusal(paper, line)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert compile_settings(changed(paper, line))[0].model.adapter == tmp_path


OWN_REFUSED = [
    ("alpha=1.5", "alpha: got 1.5, expected a number at least 0 and at most 1"),
    ("alpha=-0.1", "alpha: got -0.1, expected a number at least 0"),
    ("alpha=nan", "alpha: got nan, expected"),
    ("alpha=inf", "alpha: got inf, expected"),
    ("alpha=high", "alpha: got 'high', expected a number"),
    ("gates.wording=long", "gates.wording: got 'long', expected one of full, terse"),
    ("corpus.max_val_tasks=0", "corpus.max_val_tasks: got 0, expected a whole number at least 1 or null"),
    ("gates.warm_start.steps=1.5", "gates.warm_start.steps: got 1.5, expected a whole number"),
    ("tracking.tags=solo", "tracking.tags: got 'solo', expected a list of texts"),
    ("stop.min_delta=inf", "stop.min_delta: got inf, expected a finite number"),
    ("stop=soon", "stop: got 'soon', expected a mapping"),
]


@pytest.mark.parametrize(("line", "message"), OWN_REFUSED, ids=lambda part: part.split(":")[0])
def test_a_value_of_ours_of_another_type_or_range_is_refused(paper: DictConfig, line: str, message: str) -> None:
    with pytest.raises(Refused) as refused:
        typed_keys(resolved(changed(paper, line)))
    assert message in str(refused.value)


ACROSS = [
    (["data.train_batch_size=100"], "expected a multiple of actor_rollout_ref.actor.ppo_mini_batch_size (128)"),
    (["data.train_batch_size=64"], "expected a multiple of actor_rollout_ref.actor.ppo_mini_batch_size (128)"),
    (["corpus.val_fraction=0.6", "corpus.test_fraction=0.5"], "expected a sum below 1"),
]


@pytest.mark.parametrize(("lines", "message"), ACROSS, ids=["divides", "smaller", "fractions"])
def test_two_values_that_do_not_fit_are_refused(paper: DictConfig, lines: list[str], message: str) -> None:
    assert message in refusal(paper, *lines)


REFUSED: list[tuple[list[str], str]] = [
    ([f"{_ROLLOUT}.n=1"], "a group of one has no baseline"),
    ([f"{_ROLLOUT}.temperature=0"], "greedy rollouts of one prompt are all alike"),
    ([f"{_ROLLOUT}.top_p=0.9"], "a smaller top_p biases the policy ratio"),
    ([f"{_ROLLOUT}.top_k=5"], "a top_k biases the policy ratio"),
    ([f"{_ROLLOUT}.do_sample=false"], "training rollouts are always sampled"),
    ([f"{_MODEL}.lora_rank=0"], "without LoRA no parameter is trained"),
    ([f"{_MODEL}.path=nowhere"], "there is no such folder"),
    ([f"{_ACTOR}.optim.lr=-1"], "expected a number from 0"),
    ([f"{_ACTOR}.optim.lr=nan"], "expected a number from 0"),
    ([f"{_ACTOR}.optim.betas=[0.9]"], "expected two numbers"),
    (["data.train_batch_size=many"], "expected a whole number, 1 or more"),
    (["data.train_batch_size=true"], "expected a whole number, 1 or more"),
    (["trainer.total_training_steps=null"], "solo counts steps, not epochs"),
    ([f"{_ACTOR}.policy_loss.loss_mode=gspo"], "expected vanilla"),
    (
        [f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{_ACTOR}.loss_scale_factor=null"],
        "expected a whole number with seq-mean-token-sum-norm",
    ),
    (["algorithm.use_kl_in_reward=true"], "KL is in the loss"),
    (["critic.enable=true"], "no critic"),
    (["critic.optim.lr=1"], "informational_only"),
    ([f"{_ACTOR}.grad_clip=0.5"], "verl 0.9.1 reads actor.optim.clip_grad"),
    ([f"{_ACTOR}.fsdp_config.offload_policy=true"], "distributed_only"),
    ([f"{_ACTOR}.fsdp_config.param_offload=1"], "expected true or false"),
    (["actor_rollout_ref.ref.fsdp_config.optimizer_offload=true"], "the reference has no optimizer"),
    ([f"{_ACTOR}.fsdp_config.qat.enable=true"], "quantization-aware training"),
    (["actor_rollout_ref.ref.fsdp_config.fsdp_size=2"], "distributed_only"),
    (["trainer.nnodes=2"], "trainer.nnodes: got 2, expected 1"),
    (["trainer.n_gpus_per_node=4"], "expected 1 or 8"),
    ([f"{_ROLLOUT}.multi_turn.enable=true"], "the gates' turns are built in"),
    (["+ray_kwargs.ray_init.num_gpus=1"], "ray_kwargs.ray_init.num_gpus: got 1, expected it left out"),
    (["+actor_rollout_ref.actor.use_rollout_log_probs=true"], "expected it left out"),
    (["data.train_files=x.parquet"], "tasks come from corpus.path"),
    (["data.seed=5"], "every random stream of a run is drawn from the root key seed"),
    (["trainer.logger=[wandb]"], "W&B is tracking.wandb"),
    ([f"+{_MODEL}.override_config.rope_theta=5"], "rope_theta would change the model"),
    (["trainer.balance_batch=1"], "expected True"),  # 1 is not true
]


def batches() -> list[list[tuple[list[str], str]]]:
    """The refused values in as few configurations as have no key twice: composing is what costs."""
    found: list[tuple[set[str], list[tuple[list[str], str]]]] = []
    for lines, message in REFUSED:
        keys = {line.lstrip("+").split("=")[0] for line in lines}
        taken, cases = next(((taken, cases) for taken, cases in found if not taken & keys), (None, None))
        if taken is None or cases is None:
            found.append((keys, [(lines, message)]))
        else:
            taken |= keys
            cases.append((lines, message))
    return [cases for _, cases in found]


@pytest.mark.parametrize("cases", batches(), ids=lambda cases: f"{len(cases)}-values")
def test_what_solo_cannot_honour_is_refused_by_name(paper: DictConfig, cases: list[tuple[list[str], str]]) -> None:
    said = refusal(paper, *(line for lines, _ in cases for line in lines)).splitlines()
    for lines, message in cases:
        key = lines[-1].lstrip("+").split("=")[0]
        assert any(line.startswith(key.split(".rope")[0]) and message in line for line in said), (lines, message)


def test_an_estimator_that_solo_has_not_is_refused(paper: DictConfig) -> None:
    message = refusal(paper, "algorithm.adv_estimator=grpo_passk")
    assert "algorithm.adv_estimator: got 'grpo_passk', expected poimen_gates or gae" in message


def test_all_refused_fields_stand_in_one_message(paper: DictConfig) -> None:
    message = refusal(paper, f"{_ROLLOUT}.n=1", "trainer.nnodes=2", f"{_ACTOR}.policy_loss.loss_mode=gspo")
    assert sorted(line.split(":")[0] for line in message.splitlines()) == [
        f"{_ACTOR}.policy_loss.loss_mode",
        f"{_ROLLOUT}.n",
        "trainer.nnodes",
    ]


def test_a_bare_configuration_names_corpus_model_and_quickstart() -> None:
    from poimen_exp.config.compose import compose_config

    with pytest.raises(Refused) as refused:
        compile_settings(compose_config())
    message = str(refused.value)
    assert "corpus.path: not set" in message
    assert f"{_MODEL}.path: got 'Qwen/Qwen2.5-3B-Instruct'" in message
    assert "+experiment=quickstart" in message


def test_a_foreign_file_may_place_work_on_a_cluster_but_not_change_the_objective(paper: DictConfig) -> None:
    placed = changed(paper, "trainer.nnodes=4", f"{_ROLLOUT}.tensor_model_parallel_size=8", "critic.optim.lr=1")
    _, plan = compile_settings(placed, placement="report")
    entry = next(entry for entry in plan if entry.field == "trainer.nnodes")
    assert (entry.value, entry.disposition, entry.refusal) == (4, "distributed_only", None)
    with pytest.raises(Refused, match="KL is in the loss"):
        compile_settings(changed(paper, "algorithm.use_kl_in_reward=true"), placement="report")


def test_plan_json_has_the_fields_of_the_contract_and_the_lowering(paper: DictConfig) -> None:
    _, plan = compile_settings(paper)
    data = json.loads(json.dumps(plan_json(plan)))
    assert data["verl"] == "0.9.1"
    names = {"field", "value", "disposition", "target", "reason", "lowering"}
    assert all(set(entry) == names for entry in data["fields"])
    lowered = {entry["field"] for entry in data["fields"] if entry["lowering"] is not None}
    assert lowered == {entry["field"] for entry in data["fields"] if entry["disposition"] == "locally_lowered"}
    entry = next(entry for entry in data["fields"] if entry["field"] == f"{_ACTOR}.clip_ratio")
    assert entry["value"] == 0.2
    assert (entry["disposition"], entry["target"]) == ("exact", "loss.clip_ratio")


def test_a_resolved_file_plans_as_the_composition_it_came_from(paper: DictConfig, tmp_path: Path) -> None:
    file = tmp_path / "resolved.yaml"
    file.write_text(OmegaConf.to_yaml(paper, resolve=True))
    composed, resolved_plan = plan_fields(paper)[0], plan_fields(load_config(file))[0]
    assert resolved_plan == composed


def test_a_verl_file_without_our_keys_is_planned_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("data:\n  train_batch_size: 8\nactor_rollout_ref:\n  rollout:\n    name: vllm\n    n: 4\n")
    overrides = ["trainer.nnodes=2", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"]
    with pytest.raises(Refused, match="1 field that a solo run refuses"):
        report_plan(file_source(file, overrides), PlanRequest(as_json=True))
    data = json.loads(capsys.readouterr().out)
    assert data["missing"].keys() >= {"data.train_files", "actor_rollout_ref.model.lora_rank"}  # verl's own defaults
    assert {entry["field"]: entry["value"] for entry in data["fields"]}["actor_rollout_ref.rollout.n"] == 4
    assert not any(line.startswith("trainer.nnodes") for line in data["refused"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "expected a mapping"),
        ("a: [\n", "not YAML"),
        ("trainer:\n  tset_freq: 1\n", "did you mean trainer.test_freq"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(Refused, match=message):
        load_config(file)


def test_the_table_has_what_stands_out_and_all_of_it_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("data:\n  train_batch_size: 8\n  shuffle: true\n")
    source = file_source(file, ["actor_rollout_ref.model.use_liger=true"])
    printed = []
    for all_leaves in (False, True):
        with pytest.raises(Refused, match="1 field that a solo run refuses"):
            report_plan(source, PlanRequest(all_leaves=all_leaves))
        printed.append(capsys.readouterr().out)
    short, whole = printed
    assert [line for line in whole.splitlines() if line != line.rstrip()] == []  # nothing is padded
    at = short.index("data.train_batch_size = 8: exact -> step.train_batch_size\n")
    assert short[at:].splitlines()[1] == "    read as verl reads it"
    assert "REFUSED" in next(line for line in short.splitlines() if "model.use_liger" in line)
    named = {line.split()[0] for line in short.splitlines()}
    assert named >= {"data.train_batch_size", "actor_rollout_ref.rollout.name"}  # changed; lowered
    assert not named & {"data.shuffle", "trainer.test_freq", "alpha"}  # as they are by default
    assert "or lowered; --all: every leaf" in short
    assert ", 1 REFUSED\n" in short
    assert "FILL IN" in next(line for line in short.splitlines() if line.startswith("data.train_files"))
    assert "--all" not in whole
    leaves = {entry.field for entry in plan_fields(source.cfg)[1]}
    assert f"\n{len(leaves):,} leaves: " in short
    assert leaves <= {line.split()[0] for line in whole.splitlines()}


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not found"):
        load_config(tmp_path / "none.yaml")
