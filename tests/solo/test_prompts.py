"""Prompts from Parquet: verl's columns, choice and order of rows, chat template and lengths."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from poimen_exp.config.paths import asset
from poimen_exp.errors import Refused
from poimen_exp.gates.codec import HfCodec
from poimen_exp.solo.parquet import write_rows
from poimen_exp.solo.policy import load_codec
from poimen_exp.solo.prompts import PromptRules, PromptSet, read_prompts
from poimen_exp.solo.rewards import exact_answer, target_length
from poimen_exp.solo.sample_data import sample_rows, write_sample
from poimen_exp.solo.seeds import prompts_of_step

from .prompt_support import write_prompts

MODEL = Path(asset("quickstart/model"))
RULES = {"prompt_key": "prompt", "max_samples": -1, "shuffled": True, "seed": 5, "max_prompt_length": 64}


@pytest.fixture(scope="module")
def codec() -> HfCodec:
    return load_codec(MODEL)


def read(codec: HfCodec, *files: Path, drop: bool = False, **rules: Any) -> PromptSet:
    return read_prompts(files, codec, PromptRules(**{**RULES, **rules}, drop_overlong=drop), target_length())


def verls(files: list[Path], **data: Any) -> Any:
    """verl's dataset of the same files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer
        from verl.utils.dataset.rl_dataset import RLHFDataset

        tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
        config = OmegaConf.create(
            {"prompt_key": "prompt", "max_prompt_length": 64, "filter_overlong_prompts": False, "shuffle": True,
             "seed": 5, "filter_overlong_prompts_workers": None, **data}
        )  # fmt: skip
        max_samples = data.pop("max_samples", -1)
        return RLHFDataset([str(path) for path in files], tokenizer, config, max_samples=max_samples)


def long_row(index: int) -> dict[str, Any]:
    (row,) = sample_rows("target-length", 1, index)
    return {
        **row,
        "prompt": [{"role": "user", "content": "red lamp " * 60}],
        "extra_info": {"index": index, "target_length": 4},
    }


@pytest.mark.parametrize(
    ("data", "rules"),
    [
        ({}, {}),
        ({"max_samples": 4}, {"max_samples": 4}),
        ({"max_samples": 4, "shuffle": False}, {"max_samples": 4, "shuffled": False}),
        ({"max_samples": 4, "seed": 9}, {"max_samples": 4, "seed": 9}),
        ({"filter_overlong_prompts": True}, {"drop": True}),
    ],
    ids=["all", "drawn", "first", "another-seed", "filtered"],
)
def test_rows_and_their_order_are_those_of_verls_dataset(
    codec: HfCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], rules: dict[str, Any]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    first = write_prompts(tmp_path / "a.parquet", sample_rows("target-length", 6, 1))
    last = sample_rows("target-length", 3, 2)
    second = write_prompts(tmp_path / "b.parquet", [*last, long_row(3)] if "drop" in rules else last)
    theirs = verls([first, second], cache_dir=str(tmp_path / "cache"), **data)
    mine = read(codec, first, second, **rules)
    assert len(mine) == len(theirs)
    for row, other in zip(mine.rows, (theirs[place] for place in range(len(theirs))), strict=True):
        assert list(row.reward.messages) == other["raw_prompt"]
        assert (row.reward.data_source, row.reward.extra_info) == (other["data_source"], other["extra_info"])
        ids = theirs.tokenizer.apply_chat_template(
            other["raw_prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert list(row.prompt.ids) == list(ids)
        assert row.prompt.shared == len(ids) - 1
    assert mine.dropped == int("drop" in rules)


@pytest.mark.filterwarnings("default")  # of torchdata's import
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_come_in_the_order_of_verls_data_loader(shuffle: bool) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_sampler

    rows = list(range(11))
    sampler = create_rl_sampler(OmegaConf.create({"shuffle": shuffle, "seed": 5}), rows)
    loader = StatefulDataLoader(rows, batch_size=3, sampler=sampler, drop_last=True, num_workers=0)
    wanted = [batch.tolist() for _ in range(2) for batch in loader]  # two epochs of three batches
    assert [prompts_of_step(11, 3, 5, step, shuffle) for step in range(1, 7)] == wanted
    assert torch.tensor(wanted).shape == (6, 3)


def test_a_prompt_that_does_not_fit_is_refused_with_its_row(codec: HfCodec, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet", [*sample_rows("target-length", 2, 0), long_row(2)])
    with pytest.raises(Refused, match=r"row 3 of .*a\.parquet: a prompt of \d+ tokens, expected at most data.max_pro"):
        read(codec, path)


def broken(**changes: Any) -> dict[str, Any]:
    return {**sample_rows("target-length", 1, 0)[0], **changes}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (broken(prompt="hello"), r"^row 1 of .*a\.parquet: prompt: got hello, expected a list of"),
        (broken(prompt=[{"role": "user", "content": ["x"]}]), "row 1 of .*: prompt: got"),
        (broken(prompt=[{"role": "user", "content": " "}]), "row 1 of .*: prompt: got an empty content of user"),
        (broken(prompt=[{"role": "oracle", "content": "x"}]), "row 1 of .*: prompt: got the role 'oracle', expected"),
        (broken(data_source=None), "row 1 of .*: data_source: got None, expected a text"),
        (broken(extra_info={"index": 0, "target_length": -4}), r"row 1 of .*: extra_info.target_length: got -4"),
        (broken(extra_info=7), "row 1 of .*: extra_info: got 7"),
        ({"prompt": [], "data_source": "x"}, "no column reward_model"),
    ],
)
def test_a_row_that_is_no_prompt_is_refused_by_name(
    codec: HfCodec, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    write_rows(tmp_path / "a.parquet", [row])
    with pytest.raises(Refused, match=message):
        read(codec, tmp_path / "a.parquet")


def test_a_file_that_is_no_parquet_is_refused(codec: HfCodec, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(Refused, match=r"a\.parquet: not readable as Parquet"):
        read(codec, path)


def test_sample_files_are_the_rows_of_their_seed(codec: HfCodec, tmp_path: Path) -> None:
    write_sample(tmp_path / "a.parquet", "target-length", 5, 7)
    write_sample(tmp_path / "b.parquet", "target-length", 5, 7)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert sample_rows("exact-answer", 5, 7) != sample_rows("exact-answer", 5, 8)
    answers = read_prompts(
        [write_prompts(tmp_path / "c.parquet", sample_rows("exact-answer", 5, 7))],
        codec,
        PromptRules(**RULES, drop_overlong=False),
        exact_answer(),
    )
    assert {row.reward.data_source for row in answers.rows} == {"poimen/exact-answer"}
    with pytest.raises(Refused, match="is there already"):
        write_sample(tmp_path / "a.parquet", "target-length", 5, 8)
    with pytest.raises(Refused, match=r"ends in \.parquet"):
        write_sample(tmp_path / "a.jsonl", "target-length", 5, 8)


def test_the_files_that_ship_are_what_the_generator_gives() -> None:
    from poimen_exp.solo.parquet import read_rows

    for side, rows, seed in (("train", 96, 0), ("val", 16, 1)):
        assert read_rows(Path(asset(f"prompts/target-length-{side}.parquet")))[1] == sample_rows(
            "target-length", rows, seed
        )
