"""Single-turn prompts from Parquet, as verl lays them out.

Columns: ``prompt`` (or ``data.prompt_key``), a list of ``{"role", "content"}``; ``data_source``, a text;
``reward_model``, a mapping with ``ground_truth``; ``extra_info``, a mapping. Rows keep verl's order (files one after
another), its choice under ``*_max_samples`` and, under ``data.shuffle``, that of its sampler (``solo.seeds``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from poimen_exp.errors import Refused
from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.types import Prompt
from poimen_exp.solo.parquet import read_rows
from poimen_exp.solo.rewards import RewardInput, RewardProvider
from poimen_exp.tracking.files import sha256_of

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    Attributes:
        where: ``row N of FILE``, rows counted from 1.
        prompt: all ids but the last are what its rollouts share.
        reward: what a reward provider is told of it; its response is empty.
    """

    where: str
    prompt: Prompt
    reward: RewardInput


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one side of a run.

    Attributes:
        dropped: prompts left out because they are longer than ``data.max_prompt_length``.
        sha256: of the files, in their order.
    """

    rows: tuple[PromptRow, ...]
    dropped: int
    sha256: str

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class PromptRules:
    """How prompts are read.

    Attributes:
        max_samples: rows taken; -1 for all.
        shuffled: whether those rows are drawn (else they are the first), with ``seed``, as verl draws them.
        drop_overlong: whether longer prompts are dropped; refused where not.
    """

    prompt_key: str
    max_samples: int
    shuffled: bool
    seed: int
    max_prompt_length: int
    drop_overlong: bool


def read_prompts(files: Sequence[Path], codec: HfCodec, rules: PromptRules, provider: RewardProvider) -> PromptSet:
    """Reads, encodes and checks the prompts of some files.

    Raises:
        Refused: a file that is no Parquet, a row that is no prompt, lacks what the reward needs or is too long; the
            message names file and row.
    """
    raw = [
        (f"row {number} of {path}", row)
        for path in files
        for number, row in enumerate(_read(path, rules.prompt_key), start=1)
    ]
    rows, dropped = [], 0
    for where, values in (raw[place] for place in _chosen(len(raw), rules)):
        row = _row(where, values, codec, rules.prompt_key)
        length = len(row.prompt.ids)
        if length > rules.max_prompt_length:
            if not rules.drop_overlong:
                raise Refused(
                    f"{where}: a prompt of {length} tokens, expected at most data.max_prompt_length="
                    f"{rules.max_prompt_length}; raise it, or drop such rows: data.filter_overlong_prompts=true"
                )
            dropped += 1
            continue
        lack = provider.check(row.reward)
        if lack:
            raise Refused(f"{where}: {lack} (for the reward {provider.identity})")
        rows.append(row)
    digest = hashlib.sha256("\n".join(sha256_of(path) for path in files).encode()).hexdigest()
    return PromptSet(tuple(rows), dropped, digest)


def _read(path: Path, prompt_key: str) -> list[dict[str, Any]]:
    columns, rows = read_rows(path)
    missing = [name for name in (prompt_key, "data_source", "reward_model") if name not in columns]
    if missing:
        raise Refused(
            f"{path}: no column {', '.join(missing)}; it has {', '.join(columns)}; expected verl's columns "
            "prompt (data.prompt_key), data_source, reward_model, extra_info"
        )
    return rows


def _chosen(count: int, rules: PromptRules) -> Sequence[int]:
    """Places of the rows that are used: verl 0.9.1, ``RLHFDataset._read_files_and_tokenize``."""
    if not 0 < rules.max_samples < count:
        return range(count)
    if not rules.shuffled:
        return range(rules.max_samples)
    drawn = np.random.default_rng(rules.seed).choice(count, size=rules.max_samples, replace=False)
    return [int(place) for place in drawn]


def _row(where: str, values: Mapping[str, Any], codec: HfCodec, prompt_key: str) -> PromptRow:
    messages = _messages(where, values[prompt_key], prompt_key)
    scored, extra = values["reward_model"], values.get("extra_info")
    if scored is not None and not isinstance(scored, Mapping):
        raise Refused(f"{where}: reward_model: got {scored!r}, expected a mapping with ground_truth")
    if extra is not None and not isinstance(extra, Mapping):
        raise Refused(f"{where}: extra_info: got {extra!r}, expected a mapping")
    source = values["data_source"]
    if not isinstance(source, str) or not source:
        raise Refused(f"{where}: data_source: got {source!r}, expected a text")
    reward = RewardInput(
        where=where,
        messages=messages,
        solution="",
        response_tokens=0,
        data_source=source,
        ground_truth=(scored or {}).get("ground_truth"),
        extra_info=dict(extra or {}),
    )
    ids = codec.chat_ids(messages)
    return PromptRow(where, Prompt(ids, len(ids) - 1), reward)


def _messages(where: str, value: Any, prompt_key: str) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise Refused(f'{where}: {prompt_key}: got {str(value)[:80]}, expected a list of {{"role", "content"}} texts')
    for message in value:
        if message["role"] not in _ROLES:
            raise Refused(f"{where}: {prompt_key}: got the role {message['role']!r}, expected {' or '.join(_ROLES)}")
        if not message["content"].strip():
            raise Refused(f"{where}: {prompt_key}: got an empty content of {message['role']}, expected a text")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in ("role", "content"))
