"""``trajectories/step_N.jsonl``: every rollout of a step, one a line, as it was sampled, scored and weighed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from poimen_exp.errors import RunFailed
from poimen_exp.tracking.files import write_atomic
from poimen_exp.tracking.sums import note_sum

SCHEMA = "poimen.rollout/1"


class TurnRecord(msgspec.Struct, frozen=True):
    """One prompt and its response.

    Attributes:
        chunk: null for the answer turn.
        label: evidence; null for the answer turn and where the chunk was not labelled.
        update, end: the gates; null where the response did not parse, and for the answer turn.
        prompt_tokens: their number; the prompt itself follows from task, chunk and the memory before.
        response_ids, log_probs: one log-prob an id, as sampled.
        advantage: what the turn's tokens were weighed with, after the mix; their mean where they differ; null in a
            validation.
        advantages: one a token, where they differ (gae, reinforce_plus_plus).
    """

    chunk: int | None
    label: bool | None
    update: bool | None
    end: bool | None
    prompt_tokens: int
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    update_reward: float | None
    advantage: float | None
    advantages: tuple[float, ...] | None = None


class RolloutRecord(msgspec.Struct, frozen=True):
    """One rollout.

    Attributes:
        policy_version: number of training steps behind the policy that sampled it.
        group: place of its prompt in the batch; ``sample`` numbers the rollouts of that prompt.
        rewards: ``total`` and the parts that could be measured.
        failed: why the rollout was not finished or not scored; null where it was.
        seed: of the random stream that sampled the rollouts of this step, this one among them.
        update: ``fresh``: learnt from in one optimizer step, by the policy that sampled it; ``replay``: in several
            steps, the later ones by a policy that had moved; null in a validation.
        reward_inputs: SHA-256 of what the reward provider was told; null for the gates.
    """

    step: int
    policy_version: int
    group: int
    sample: int
    task_id: str
    turns: tuple[TurnRecord, ...]
    answer: str | None
    exit_index: int | None
    rewards: Mapping[str, float]
    failed: str | None = None
    seed: int | None = None
    update: Literal["fresh", "replay"] | None = None
    reward_inputs: str | None = None
    schema: str = SCHEMA


def write_trajectories(path: Path, records: Iterable[RolloutRecord]) -> None:
    """Writes the rollouts of a step; the file appears whole or not at all, then its hash in ``SHA256SUMS`` beside it.

    Raises:
        RunFailed: a reward, advantage or log-prob that is not finite, or not one log-prob an id; the message names
            the rollout.
    """
    encoder = msgspec.json.Encoder()
    buffer = bytearray()
    for record in records:
        _check(record)
        buffer += encoder.encode(record)
        buffer += b"\n"
    write_atomic(path, bytes(buffer))
    note_sum(path)


def read_trajectories(path: Path) -> Iterator[RolloutRecord]:
    """The rollouts in a file, one at a time.

    Raises:
        RunFailed: a line that is not a rollout, or a last line without its end; the message starts with ``file:line``.
    """
    decoder = msgspec.json.Decoder(RolloutRecord)
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                record = decoder.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RunFailed(f"{path}:{number}: damaged: {error}; expected a rollout ({SCHEMA})") from error
            if not raw.endswith(b"\n") or record.schema != SCHEMA:
                raise RunFailed(f"{path}:{number}: damaged: cut short, or schema {record.schema!r} (expected {SCHEMA})")
            yield record


def _check(record: RolloutRecord) -> None:
    # msgspec writes NaN and infinity as null, which a reader would take for "not measured".
    where = f"rollout {record.sample} of group {record.group} (task {record.task_id}) at step {record.step}"
    for name, value in record.rewards.items():
        if not math.isfinite(value):
            raise RunFailed(f"reward/{name} of {where}: got {value}, expected a finite number")
    for turn in record.turns:
        place = "the answer" if turn.chunk is None else f"chunk {turn.chunk}"
        numbers = (turn.update_reward or 0.0, turn.advantage or 0.0, sum(turn.log_probs), sum(turn.advantages or ()))
        if not all(map(math.isfinite, numbers)):
            raise RunFailed(f"update reward, advantage or log-prob at {place} of {where}: not finite")
        if len(turn.response_ids) != len(turn.log_probs):
            raise RunFailed(
                f"{place} of {where}: {len(turn.response_ids)} ids and {len(turn.log_probs)} log-probs, expected equal"
            )
