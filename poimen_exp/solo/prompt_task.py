"""Single-turn prompts as a task of the training loop: responses in, scores and verl's advantages out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.metrics import Means
from poimen_exp.gates.types import Generation, Sampling
from poimen_exp.solo.engine import Request
from poimen_exp.solo.engines import Engine
from poimen_exp.solo.estimators import Estimate, estimate
from poimen_exp.solo.prompt_metrics import batch_metrics
from poimen_exp.solo.prompts import PromptRow, PromptSet
from poimen_exp.solo.rewards import Reward, RewardFailed, RewardInput, RewardProvider, checked_scores
from poimen_exp.solo.rows import Row
from poimen_exp.solo.seeds import stream, stream_seed
from poimen_exp.solo.settings import AlgorithmSettings, RolloutSettings
from poimen_exp.solo.task import Measured, Needs, RolloutBatch, Validation
from poimen_exp.tracking.trajectories import RolloutRecord, TurnRecord


@dataclass(frozen=True)
class _Response:
    """One sampled response: place of its prompt in the batch, number among that prompt's, and what was sampled."""

    row: PromptRow
    group: int
    sample: int
    generation: Generation
    text: str
    told: RewardInput


class PromptTask:
    """Answers prompts with the current policy and has the answers scored.

    Args:
        fresh: whether a batch makes one optimizer step, for the records.
        device: of the engine, where random numbers are drawn.
    """

    def __init__(
        self,
        train: PromptSet,
        val: PromptSet,
        codec: HfCodec,
        engine: Engine,
        reward: RewardProvider,
        algorithm: AlgorithmSettings,
        rollout: RolloutSettings,
        fresh: bool,
        seed: int,
        device: torch.device,
    ) -> None:
        self._train, self._val, self._codec, self._engine = train, val, codec, engine
        self._reward, self._algorithm, self._rollout = reward, algorithm, rollout
        self._fresh, self._seed, self._device = fresh, seed, device

    @property
    def train_size(self) -> int:
        """Number of training prompts."""
        return len(self._train)

    @property
    def needs(self) -> Needs:
        """Log-probs of both policies for KL in the reward; the critic's values for gae."""
        kl = self._algorithm.use_kl_in_reward
        return Needs(log_probs=kl, ref_log_probs=kl, values=self._algorithm.adv_estimator == "gae")

    def rollout(self, prompts: Sequence[int], step: int) -> RolloutBatch:
        """``group_size`` responses to each training prompt, scored; a prompt's group is its place in ``prompts``.

        Raises:
            RewardFailed: a reward raised or is no number.
        """
        rows = [self._train.rows[place] for place in prompts]
        responses = self._respond(rows, self._rollout.group_size, self._rollout.train, "rollout", step)
        rewards, seconds = self._score(responses, "rollout", step)
        return RolloutBatch(
            rows=tuple(Row(r.row.prompt, r.generation.ids, r.generation.log_probs) for r in responses),
            names=tuple(f"prompt {r.row.where}, sample {r.sample}" for r in responses),
            advantages=(),
            group=torch.tensor([r.group for r in responses]),
            metrics=Means(),
            watch=Means(),
            attempted=len(responses),
            failed=0,
            records=self._records(responses, rewards, "rollout", step),
            scores=torch.tensor([reward.total for reward in rewards]),
            reward_s=seconds,
        )

    def weigh(self, batch: RolloutBatch, measured: Measured) -> RolloutBatch:
        """The batch with rewards less KL, advantages and returns, in metrics and records too."""
        assert batch.scores is not None
        found = estimate(
            batch.scores,
            batch.group,
            [len(row.response) for row in batch.rows],
            self._algorithm,
            measured.log_probs,
            measured.ref_log_probs,
            measured.values,
        )
        limits = self._rollout.max_prompt_length, self._rollout.train.max_tokens
        named, counts = batch_metrics(batch, found, measured.values, self._algorithm, *limits)
        return replace(
            batch,
            advantages=found.advantages,
            returns=found.returns,
            records=_weighed(batch.records, found),
            named=named,
            counts=counts,
        )

    def validate(self, step: int) -> Validation:
        """Responses to the validation prompts, with the same random numbers at every step."""
        rollout = self._rollout
        responses = self._respond(self._val.rows, rollout.val_group_size, rollout.val, "val", 0)
        rewards, _ = self._score(responses, "val", step)
        metrics = Means()
        metrics.add("reward/total", (reward.total for reward in rewards))
        metrics.add("response_length/mean", (len(r.generation.ids) for r in responses))
        metrics.add("response_length/clipped", (r.generation.clipped for r in responses))
        return Validation(metrics, len(responses), 0, self._records(responses, rewards, "val", step))

    def _respond(
        self, rows: Sequence[PromptRow], group_size: int, sampling: Sampling, phase: str, step: int
    ) -> list[_Response]:
        generator = stream(self._seed, phase, step, device=self._device)
        places = [(group, sample) for group in range(len(rows)) for sample in range(group_size)]
        asked = [Request(rows[group].prompt, sampling) for group, _ in places]
        answers = self._engine.generate(asked, generator)
        return [
            self._response(rows[group], group, sample, answer)
            for (group, sample), answer in zip(places, answers, strict=True)
        ]

    def _response(self, row: PromptRow, group: int, sample: int, answer: Generation) -> _Response:
        text = self._codec.plain_text(answer.ids)
        spoken = len(answer.ids) - (not answer.clipped)  # without the id that ended it
        return _Response(row, group, sample, answer, text, replace(row.reward, solution=text, response_tokens=spoken))

    def _score(self, responses: Sequence[_Response], phase: str, step: int) -> tuple[Sequence[Reward], float]:
        """A reward for each response, and the seconds that took."""
        begun = time.perf_counter()
        try:
            rewards = checked_scores(self._reward, [response.told for response in responses])
        except RewardFailed as error:
            unscored = [Reward(math.nan)] * len(responses)
            records = list(self._records(responses, unscored, phase, step))
            records[error.place] = msgspec.structs.replace(records[error.place], failed=str(error))
            raise RewardFailed(f"step {step}: {error}", error.place, tuple(records)) from error
        return rewards, time.perf_counter() - begun

    def _records(
        self, responses: Sequence[_Response], rewards: Sequence[Reward], phase: str, step: int
    ) -> tuple[RolloutRecord, ...]:
        """``step`` of a validation is that of the policy; its random numbers are those of step 0."""
        training = phase == "rollout"
        return tuple(
            RolloutRecord(
                step=step,
                policy_version=step - 1 if training else step,
                group=response.group,
                sample=response.sample,
                task_id=response.row.where,
                turns=(_turn(response),),
                answer=None,
                exit_index=None,
                rewards=_finite({"total": reward.total, **reward.parts}),
                seed=stream_seed(self._seed, phase, step if training else 0),
                update=("fresh" if self._fresh else "replay") if training else None,
                reward_inputs=response.told.sha256(),
            )
            for response, reward in zip(responses, rewards, strict=True)
        )


def _turn(response: _Response) -> TurnRecord:
    return TurnRecord(
        chunk=None,
        label=None,
        update=None,
        end=None,
        prompt_tokens=len(response.row.prompt.ids),
        response_ids=response.generation.ids,
        log_probs=response.generation.log_probs,
        text=response.text,
        update_reward=None,
        advantage=None,
    )


def _weighed(records: Sequence[RolloutRecord], found: Estimate) -> tuple[RolloutRecord, ...]:
    """The records with what their tokens are weighed with, and with the reward that KL left."""
    out = []
    for record, advantages, rewards in zip(records, found.advantages, found.rewards, strict=True):
        same = bool((advantages == advantages[0]).all())
        mean = float(advantages.mean()) if not same else float(advantages[0])
        turn = msgspec.structs.replace(
            record.turns[0],
            advantage=mean if math.isfinite(mean) else None,
            advantages=None if same or not math.isfinite(mean) else tuple(advantages.tolist()),
        )
        kept = {} if found.kl is None else {"less_kl": float(rewards.sum())}
        out.append(msgspec.structs.replace(record, turns=(turn,), rewards={**record.rewards, **_finite(kept)}))
    return tuple(out)


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
