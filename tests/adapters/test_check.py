"""Mount check and probe: each thing that can be wrong has its own message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from poimen_exp.adapters.check import mount_check
from poimen_exp.adapters.export import export_adapter
from poimen_exp.adapters.lora_config import check_lora_config, mountable_linears, vllm_rank
from poimen_exp.adapters.preflight import check_before_publishing, check_before_training
from poimen_exp.adapters.probe import probe
from poimen_exp.errors import Refused

from .conftest import make_info, make_peft, make_tiny_model

WEIGHTS = "adapter_model.safetensors"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def without_manifest(folder: Path) -> Path:
    """So that the check behind the hashes is reached."""
    (folder / "poimen.json").unlink()
    return folder


def test_a_trained_adapter_passes(adapter: Path, base: Path) -> None:
    mount_check(adapter, base)


def test_an_adapter_of_another_program_passes_without_a_manifest(adapter: Path, base: Path) -> None:
    mount_check(without_manifest(adapter), base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"bias": "all"}, "trains biases"),
        ({"lora_bias": True}, "trains biases"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"r": 513, "rank_pattern": {}}, "r is 513; vLLM serves ranks from 1 to 512"),
        ({"rank_pattern": {"q_proj": 600}}, r"rank_pattern\[q_proj\] is 600"),
        ({"rank_pattern": {"q_proj": 16}}, r"rank_pattern\[q_proj\] differs from r=8, lora_alpha=16"),
        ({"alpha_pattern": {"q_proj": 64}}, r"alpha_pattern\[q_proj\] differs"),
        ({"target_modules": ["q_proj", "query"]}, "target module 'query' is none"),
        ({"target_modules": ["lm_head"]}, "target module 'lm_head' is none"),
        ({"target_modules": []}, "target_modules missing"),
        ({"r": 4}, r"has rank 8, adapter_config\.json says r=4"),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "k_proj"]}, r"no tensors for model\.layers\.0.*k_proj"),
    ],
)
def test_a_configuration_that_vllm_would_refuse_or_misread_is_refused(adapter, base, changes, message) -> None:
    change_config(without_manifest(adapter), **changes)
    with pytest.raises(Refused, match=message):
        mount_check(adapter, base)


def test_a_pattern_that_says_what_the_global_values_say_passes(adapter: Path, base: Path) -> None:
    change_config(without_manifest(adapter), rank_pattern={"q_proj": 8}, alpha_pattern={"q_proj": 16})
    mount_check(adapter, base)


def _zero_b(weights) -> None:
    for key in weights:
        if "lora_B" in key:
            weights[key].zero_()


def _rename(weights, old: str, new: str) -> None:
    weights[new] = weights.pop(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_zero_b, "every lora_B is zero"),
        (lambda w: w.pop(f"{FIRST}.lora_B.weight"), "q_proj has lora_A only"),
        (lambda w: w[f"{FIRST}.lora_B.weight"].fill_(float("inf")), "holds NaN or infinity"),
        (
            lambda w: _rename(w, f"{FIRST}.lora_A.weight", FIRST.removeprefix("base_model.") + ".lora_A.weight"),
            "key prefix was changed",
        ),
        (
            lambda w: w.update({"base_model.model.model.embed_tokens.weight": torch.zeros(2, 2)}),
            "embed_tokens.weight is no lora_A or lora_B",
        ),
        (
            lambda w: [_rename(w, f"{FIRST}.lora_{s}.weight", FIRST + f"_x.lora_{s}.weight") for s in "AB"],
            "no linear layer model.layers.0.self_attn.q_proj_x",
        ),
        (lambda w: w.update({f"{FIRST}.lora_B.weight": torch.ones(32, 8)}), r"B \[32, 8\], the base model needs"),
        (lambda w: w.clear(), "holds no tensors"),
    ],
)
def test_weights_that_would_not_arrive_in_the_model_are_refused(adapter, base, change, message) -> None:
    change_weights(without_manifest(adapter), change)
    with pytest.raises(Refused, match=message):
        mount_check(adapter, base)


def test_a_folder_that_is_none_or_lacks_a_file_is_refused(adapter: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no such folder"):
        mount_check(tmp_path / "nowhere", base)
    with pytest.raises(Refused, match=r"base model .*no config\.json"):
        mount_check(adapter, tmp_path)
    (adapter / WEIGHTS).unlink()
    with pytest.raises(Refused, match=f"no {WEIGHTS}"):
        mount_check(adapter, base)
    (adapter / "adapter_config.json").write_text("{'r': 8}")
    with pytest.raises(Refused, match="not plain JSON"):
        mount_check(adapter, base)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(Refused, match=r"no adapter_config\.json"):
        mount_check(adapter, base)


def test_a_cut_weights_file_is_refused(adapter: Path, base: Path) -> None:
    data = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(data[:-100])
    with pytest.raises(Refused, match="not a whole safetensors file"):
        mount_check(without_manifest(adapter), base)


def test_tokens_of_its_own_are_refused(adapter: Path, base: Path) -> None:
    (adapter / "added_tokens.json").write_text("{}")
    with pytest.raises(Refused, match=r"holds added_tokens\.json"):
        mount_check(adapter, base)


def test_a_changed_weight_is_found_by_its_hash(adapter: Path, base: Path) -> None:
    change_weights(adapter, lambda weights: weights[f"{FIRST}.lora_A.weight"].mul_(2))
    with pytest.raises(Refused, match=r"adapter_model\.safetensors: sha256 is .*poimen\.json says"):
        mount_check(adapter, base)


def test_the_same_architecture_with_other_weights_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=7)
    with pytest.raises(Refused, match=r"trained on tiny-qwen2 .*expected the same weights"):
        mount_check(adapter, other)


def test_a_training_run_can_ask_before_it_trains(base: Path) -> None:
    linears = mountable_linears(base)
    assert linears["model.layers.1.mlp.down_proj"] == (128, 64)
    assert "lm_head" not in linears
    check_lora_config({"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}, linears, "lora")
    with pytest.raises(Refused, match=r"^lora: target module 'wq' is none"):
        check_lora_config({"r": 16, "lora_alpha": 32, "target_modules": ["wq"]}, linears, "lora")


@pytest.mark.parametrize(("rank", "allowed"), [(1, 1), (2, 8), (8, 8), (16, 16), (17, 32), (257, 320), (512, 512)])
def test_the_served_rank_is_the_smallest_that_vllm_allows(rank: int, allowed: int) -> None:
    assert vllm_rank(rank) == allowed


def test_the_probe_measures_an_effect_and_a_reload(adapter: Path, base: Path) -> None:
    report = probe(adapter, base)
    assert report.effect > 0.1
    assert report.prompt_tokens > 20


def test_the_probe_refuses_an_adapter_without_effect(base: Path, tmp_path: Path) -> None:
    folder = export_adapter(make_peft(base), tmp_path / "fresh", make_info(base))
    with pytest.raises(Refused, match="the adapter has no effect"):
        probe(folder, base)


def test_what_could_be_trained_but_not_served_is_refused_before_training(adapter: Path, base: Path, tmp_path) -> None:
    check_before_training(base, 16, 32, ("q_proj", "v_proj"), adapter)
    with pytest.raises(Refused, match="r is 600"):
        check_before_training(base, 600, 32, "all-linear", None)
    with pytest.raises(Refused, match="target module 'embed_tokens' is none"):
        check_before_training(base, 16, 32, ["q_proj", "embed_tokens"], None)
    with pytest.raises(Refused, match="no such folder"):
        check_before_training(base, 16, 32, "all-linear", tmp_path / "nowhere")


def test_a_name_or_registry_that_would_lose_the_adapter_is_refused_before_training(tmp_path: Path) -> None:
    check_before_publishing(None, "never looked at, not a name")
    check_before_publishing(str(tmp_path / "registry"), "gates")
    with pytest.raises(Refused, match="adapter name 'My Gates'"):
        check_before_publishing(str(tmp_path / "registry"), "My Gates")
    with pytest.raises(Refused, match="registry 'nosuch://x'"):
        check_before_publishing("nosuch://x", "gates")
