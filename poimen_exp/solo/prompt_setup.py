"""What a run of single-turn prompts reads before it starts: tokenizer, prompts, reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from poimen_exp.adapters.manifest import PROMPTS_PROTOCOL, AdapterInfo
from poimen_exp.errors import Refused
from poimen_exp.gates.codec import HfCodec
from poimen_exp.solo.engines import Engine
from poimen_exp.solo.policy import Policy, load_codec, pick_device
from poimen_exp.solo.prompt_task import PromptTask
from poimen_exp.solo.prompts import PromptRules, PromptSet, read_prompts
from poimen_exp.solo.rewards import RewardProvider, custom_function, exact_answer, target_length, verl_scorer
from poimen_exp.solo.settings import RewardSettings, SoloSettings
from poimen_exp.solo.setup import Prepared, require_model_folder, task_identity
from poimen_exp.solo.task import Task


@dataclass(frozen=True)
class PromptSetup:
    """Tokenizer, prompts of both sides, and what scores their responses."""

    codec: HfCodec
    train: PromptSet
    val: PromptSet
    reward: RewardProvider

    @property
    def train_size(self) -> int:
        """Number of training prompts."""
        return len(self.train)

    def identity(self, settings: SoloSettings) -> dict[str, str]:
        """What must not change between the parts of one run, beside model and seed."""
        return {
            "data": f"train {self.train.sha256}, val {self.val.sha256}",
            "reward": self.reward.identity,
        } | task_identity(settings)

    def prepare(self, settings: SoloSettings, policy: Policy, say: Callable[[str], None]) -> Prepared:
        """The adapter weights that KL is measured against: the frozen base, as verl has it under LoRA."""
        for name, side in (("train", self.train), ("val", self.val)):
            if side.dropped:
                limit = settings.rollout.max_prompt_length
                say(f"data.{name}_files: {side.dropped} prompts dropped, longer than {limit} tokens")
        return Prepared(policy.base_state())

    def task(self, settings: SoloSettings, engine: Engine, device: torch.device) -> Task:
        """The prompts of a run."""
        return PromptTask(
            self.train,
            self.val,
            self.codec,
            engine,
            self.reward,
            settings.algorithm,
            settings.rollout,
            settings.step.fresh,
            settings.seed,
            device,
        )

    def adapter_info(self, settings: SoloSettings, run_id: str, step: int, metrics: Mapping[str, float]) -> AdapterInfo:
        """What the adapter's manifest says."""
        assert settings.prompts is not None
        return AdapterInfo(
            base_model=settings.model.path,
            dtype=settings.model.dtype,
            layout=None,
            wording=None,
            memory_tokens=0,
            chunk_tokens=settings.rollout.max_prompt_length,
            response_tokens=settings.rollout.val.max_tokens,
            corpus_id=", ".join(path.name for path in settings.prompts.train_files),
            corpus_sha256=self.train.sha256,
            label_status=None,
            run_id=run_id,
            step=step,
            metrics=metrics,
            protocol=PROMPTS_PROTOCOL,
        )


def prompt_setup(settings: SoloSettings, reward: RewardProvider | None = None) -> PromptSetup:
    """Opens model folder, reward and prompts.

    Args:
        reward: scores in place of what the settings name: a provider of the caller's, ``Weighted`` ones, a verifier.

    Raises:
        Refused: a model folder that is not one, a reward that does not load, a row that is no prompt, lacks what the
            reward needs or is too long.
    """
    assert settings.prompts is not None
    require_model_folder(settings.model.path)
    codec = load_codec(settings.model.path)
    provider = named_reward(settings.reward, settings.device) if reward is None else reward

    def side(files: tuple[Path, ...], max_samples: int) -> PromptSet:
        assert settings.prompts is not None
        rules = PromptRules(
            settings.prompts.prompt_key,
            max_samples,
            settings.step.shuffle,
            settings.seed,
            settings.rollout.max_prompt_length,
            settings.prompts.filter_overlong_prompts,
        )
        return read_prompts(files, codec, rules, provider)

    train = side(settings.prompts.train_files, settings.prompts.train_max_samples)
    val = side(settings.prompts.val_files, settings.prompts.val_max_samples)
    if not len(val):
        raise Refused("data.val_files: no prompt is left, expected at least one to validate with")
    return PromptSetup(codec, train, val, provider)


def named_reward(settings: RewardSettings, device: str) -> RewardProvider:
    """The provider that the configuration names; the plan has seen to it that there is exactly one."""
    if settings.custom_path is not None:
        return custom_function(settings.custom_path, settings.custom_name)
    if settings.model_path is not None:
        from poimen_exp.solo.reward_model import SequenceClassifier

        return SequenceClassifier(settings, pick_device(device))
    if settings.provider == "exact_answer":
        return exact_answer()
    return target_length() if settings.provider == "target_length" else verl_scorer()
