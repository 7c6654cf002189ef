"""The sequence classifier as a reward: scores, neighbours, identity, and that it leaves the device."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from poimen_exp.config.paths import asset
from poimen_exp.errors import Refused
from poimen_exp.solo.reward_model import SequenceClassifier
from poimen_exp.solo.rewards import RewardInput
from poimen_exp.solo.settings import RewardSettings

from .prompt_support import run, small_settings
from .support import CPU

SHIPPED = Path(asset("quickstart/model"))
TOLD = [
    RewardInput("f:0", ({"role": "user", "content": "Where is the red lamp?"},), text, 0, "x", None, {})
    for text in ("in the hall", "here", "in the old garden by the river", "in the hall")
]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of three labels on the shipped model's backbone, with its tokenizer."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("rm")
    config = AutoConfig.from_pretrained(SHIPPED, local_files_only=True)
    config.num_labels = 3
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SHIPPED / name, folder)
    return folder


def settings_for(folder: Path, **changes: object) -> RewardSettings:
    return replace(RewardSettings(model_path=folder, model_dtype="float32"), **changes)  # type: ignore[arg-type]


def plain_score(folder: Path, item: RewardInput) -> float:
    """The last label's logit at the last token, one text at a time, without padding."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    dialogue = [*item.messages, {"role": "assistant", "content": item.solution}]
    ids = tokenizer.apply_chat_template(dialogue, tokenize=True, return_dict=False)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        return float(model.score(hidden)[-1])


@pytest.mark.parametrize("budget", [1, 8192])
def test_scores_are_those_of_one_text_at_a_time_and_do_not_depend_on_neighbours(classifier: Path, budget: int) -> None:
    made = SequenceClassifier(settings_for(classifier, model_batch_tokens=budget), CPU)
    got = [reward.total for reward in made.score(TOLD)]
    assert got == pytest.approx([plain_score(classifier, item) for item in TOLD], abs=1e-5)
    assert got[0] == got[3]
    assert len(set(got)) == 3
    assert [reward.total for reward in made.score(TOLD)] == got


def test_it_lies_in_main_memory_between_phases_also_after_a_failure(
    classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves are recorded and not made: there may be no GPU."""
    made = SequenceClassifier(settings_for(classifier), CPU)
    moves: list[str] = []
    to = made._model.to
    monkeypatch.setattr(made._model, "to", lambda device: (moves.append(str(device)), to("cpu"))[1])
    made.score(TOLD[:1])
    monkeypatch.setattr(made, "_ids", lambda _: (10**6,))
    with pytest.raises(IndexError):
        made.score(TOLD[:1])
    assert moves == ["cpu", "cpu", "cpu", "cpu"]  # in, out, in, out
    assert made.device.type == "cpu"


def test_model_and_tokenizer_are_pinned_by_hash(classifier: Path, tmp_path: Path) -> None:
    first = SequenceClassifier(settings_for(classifier), CPU).identity
    assert "model sha256" in first
    assert "tokenizer sha256" in first
    other = Path(shutil.copytree(classifier, tmp_path / "rm"))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + "\n")
    assert SequenceClassifier(settings_for(other), CPU).identity.split("tokenizer")[0].split("model")[1] in first
    assert SequenceClassifier(settings_for(other), CPU).identity.split("tokenizer")[1] not in first


def test_a_model_without_a_trained_head_is_refused() -> None:
    with pytest.raises(Refused, match=r"no trained sequence classifier: score\.weight"):
        SequenceClassifier(settings_for(SHIPPED), CPU)


def test_a_run_is_scored_by_the_classifier_that_the_configuration_names(classifier: Path, tmp_path: Path) -> None:
    lines = [
        "reward.custom_reward_function.path=null",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={classifier}",
        "reward.reward_model.rollout.dtype=float32",
        "trainer.total_training_steps=1",
    ]
    settings = small_settings("grpo", *lines)
    assert settings.reward.model_path == classifier
    result = run(settings, tmp_path / "r")
    assert result.status == "completed"
    assert result.objective_value is not None
    assert result.objective_value != 0.0
