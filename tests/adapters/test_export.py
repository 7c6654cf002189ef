"""Export: three files, whole or not at all, that reload as what was trained."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from poimen_exp.adapters import export
from poimen_exp.adapters.check import mount_check
from poimen_exp.adapters.export import export_adapter, export_state_dict
from poimen_exp.adapters.hashing import base_model_sha256
from poimen_exp.adapters.manifest import parse_manifest, read_manifest
from poimen_exp.errors import Refused, RunFailed

from .conftest import make_info, make_peft, make_tiny_model

IDS = torch.arange(3, 40)[None]


def test_an_exported_adapter_reloads_with_the_logits_it_was_trained_to(trained, adapter: Path, base: Path) -> None:
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).eval()
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids=IDS).logits, trained(input_ids=IDS).logits)
        with reloaded.disable_adapter():
            assert not torch.allclose(reloaded(input_ids=IDS).logits, trained(input_ids=IDS).logits, atol=1e-2)


def test_keys_are_peft_s_own_and_every_pair_is_there(adapter: Path) -> None:
    keys = set(load_file(adapter / "adapter_model.safetensors"))
    modules = [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "self_attn.v_proj")]
    modules += [f"layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    assert keys == {f"base_model.model.model.{module}.lora_{side}.weight" for module in modules for side in "AB"}


def test_the_folder_can_be_read_by_another_user(adapter: Path) -> None:
    assert {path.name for path in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "poimen.json",
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in adapter.iterdir())
    assert stat.S_IMODE(adapter.stat().st_mode) == 0o755


def test_the_manifest_says_what_was_trained_on_what(adapter: Path, base: Path) -> None:
    manifest = read_manifest(adapter)
    assert (manifest.lora_rank, manifest.lora_alpha) == (8, 16)
    assert manifest.target_modules == ("down_proj", "q_proj", "v_proj")
    assert (manifest.base_model.name, manifest.base_model.sha256) == ("tiny-qwen2", base_model_sha256(base))
    assert (manifest.layout, manifest.wording, manifest.protocol) == ("chunk_first", "terse", "poimen.protocol/1")
    assert (manifest.memory_tokens, manifest.chunk_tokens, manifest.response_tokens) == (32, 40, 64)
    assert (manifest.corpus_id, manifest.label_status, manifest.run_id) == ("logs", "constructed", "run-1")
    assert dict(manifest.metrics) == {"val/reward/total": 1.25}
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    assert manifest.sha256["adapter_model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert (manifest.name, manifest.version) == (None, None)


def test_a_gathered_fsdp_state_exports_the_same_bytes_as_the_model(
    trained, adapter: Path, base: Path, tmp_path
) -> None:
    tensors = {
        "_fsdp_wrapped_module." + key.replace(".model.layers", ".model._fsdp_wrapped_module.layers"): value
        for key, value in trained.state_dict().items()
        if "lora_" in key
    }
    assert any(".lora_A.default.weight" in key for key in tensors)
    other = export_state_dict(tensors, trained.peft_config["default"], tmp_path / "fsdp", make_info(base))
    for name in ("adapter_model.safetensors", "adapter_config.json", "poimen.json"):
        assert (other / name).read_bytes() == (adapter / name).read_bytes()


def test_a_composed_lora_configuration_becomes_plain_json(trained, base: Path, tmp_path: Path) -> None:
    composed = OmegaConf.create({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]})
    tensors = {key: value for key, value in trained.state_dict().items() if "lora_" in key}
    nested = {"r": composed.r, "lora_alpha": composed.lora_alpha, "target_modules": composed.target_modules}
    folder = export_state_dict(tensors, nested, tmp_path / "a", make_info(base))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(base)
    mount_check(folder, base)


def test_weights_that_are_not_finite_are_named_and_leave_the_old_adapter(base: Path, adapter: Path) -> None:
    before = (adapter / "poimen.json").read_bytes()
    broken = make_peft(base)
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_B.default.weight"
    broken.get_parameter(key).data[0, 0] = float("nan")
    with pytest.raises(RunFailed, match=r"layers\.1\.mlp\.down_proj\.lora_B\.weight .*NaN"):
        export_adapter(broken, adapter, make_info(base))
    assert (adapter / "poimen.json").read_bytes() == before


def test_a_metric_without_a_value_is_refused_by_name(trained, base: Path, tmp_path: Path) -> None:
    info = make_info(base, metrics={"val/reward/total": float("nan")})
    with pytest.raises(RunFailed, match="val/reward/total is nan"):
        export_adapter(trained, tmp_path / "a", info)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_dies_leaves_no_adapter_folder(trained, base: Path, tmp_path: Path, monkeypatch) -> None:
    def die(*_: object) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(export, "sha256_of_file", die)
    with pytest.raises(OSError, match="disk full"):
        export_adapter(trained, tmp_path / "a", make_info(base))
    assert list(tmp_path.iterdir()) == []


def test_an_export_over_an_older_one_replaces_it_whole(trained, adapter: Path, base: Path) -> None:
    (adapter / "stale.txt").write_text("from before")
    export_adapter(trained, adapter, make_info(base, step=9))
    assert read_manifest(adapter).step == 9
    assert not (adapter / "stale.txt").exists()
    assert [path.name for path in adapter.parent.iterdir()] == ["adapter"]


def test_the_base_hash_ignores_where_the_model_lies_and_sees_a_changed_weight(base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(copy)
    assert base_model_sha256(copy) == base_model_sha256(base)
    other = make_tiny_model(tmp_path / "other", seed=7)
    assert base_model_sha256(other) != base_model_sha256(base)


def test_the_base_hash_is_remembered_until_a_file_changes(base: Path, tmp_path: Path, monkeypatch) -> None:
    from poimen_exp.adapters import hashing

    copy = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(copy)
    first = base_model_sha256(copy)
    read: list[Path] = []
    real = hashing.sha256_of_file
    monkeypatch.setattr(hashing, "sha256_of_file", lambda path: read.append(path) or real(path))
    assert base_model_sha256(copy) == first
    assert read == []
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert base_model_sha256(copy) != first
    assert read == [weights]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('"layout": "chunk_first"', "layout"),
        ('"memory_tokens": 32', "memory_tokens"),
        ('"schema": "poimen.adapter/1"', "schema"),
    ],
)
def test_a_manifest_with_a_wrong_field_is_refused_by_name(adapter: Path, change: str, message: str) -> None:
    text = (adapter / "poimen.json").read_text()
    assert change in text
    with pytest.raises(Refused, match=message):
        parse_manifest(text.replace(change, change.split(":")[0] + ': "other"'), "poimen.json")


def test_a_file_that_is_no_json_is_no_manifest() -> None:
    with pytest.raises(Refused, match=r"x/poimen\.json: not a poimen\.adapter/1 manifest"):
        parse_manifest("{", "x/poimen.json")
