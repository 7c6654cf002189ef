"""Reward providers: values, failures that end a run, and what is recorded of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from poimen_exp.errors import Refused, RunFailed
from poimen_exp.solo.rewards import (
    PerRow,
    Reward,
    RewardFailed,
    RewardInput,
    Weighted,
    checked_scores,
    custom_function,
    exact_answer,
    target_length,
    verl_scorer,
)
from poimen_exp.tracking.trajectories import read_trajectories

from .prompt_support import run, small_settings

ROW = RewardInput("f.parquet:3", ({"role": "user", "content": "2 + 2?"},), "", 0, "poimen/x", "4", {"target_length": 8})


def told(solution: str, tokens: int = 0, **changes: object) -> RewardInput:
    return replace(ROW, solution=solution, response_tokens=tokens, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("4", "4", 1.0),
        (" The 4. ", "4", 1.0),
        ("it is 4", "4", 0.0),
        ("first \\boxed{5}, no: \\boxed{4}", "4", 1.0),
        ("4 \\boxed{5}", "4", 0.0),
        ("four", ["4", "Four"], 1.0),
        ("", "4", 0.0),
    ],
)
def test_exact_answer(solution: str, truth: object, expected: float) -> None:
    (reward,) = exact_answer().score([told(solution, ground_truth=truth)])
    assert reward.total == expected


@pytest.mark.parametrize(("tokens", "expected"), [(8, 1.0), (6, 0.75), (10, 0.75), (16, 0.0), (40, 0.0), (0, 0.0)])
def test_target_length_falls_on_both_sides(tokens: int, expected: float) -> None:
    (reward,) = target_length().score([told("x", tokens)])
    assert reward.total == expected


def test_a_row_without_what_the_reward_reads_is_named_before_the_run() -> None:
    assert exact_answer().check(replace(ROW, ground_truth=None)) is not None
    for silent in ("", "The.", [], ["4", ""], ["4", None]):  # an empty response would be right
        assert "silence" in str(exact_answer().check(replace(ROW, ground_truth=silent))), silent
    assert exact_answer().check(replace(ROW, ground_truth=["4", "four"])) is None
    assert target_length().check(replace(ROW, extra_info={})) is not None
    assert target_length().check(replace(ROW, extra_info={"target_length": 0})) is not None
    assert exact_answer().check(ROW) is None
    assert target_length().check(ROW) is None


def test_verls_own_scorer_is_chosen_by_data_source() -> None:
    item = told("so it is #### 4", data_source="openai/gsm8k")
    assert [reward.total for reward in verl_scorer().score([item, replace(item, solution="#### 5")])] == [1.0, 0.0]
    with pytest.raises(RewardFailed, match=r"f\.parquet:3: .* raised NotImplementedError.*data_source='poimen/x'"):
        verl_scorer().score([told("4")])


def test_a_source_that_verls_scorer_does_not_know_is_named_before_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    scorer = verl_scorer()
    assert "got 'poimen/x', expected one that verl's scorer takes" in str(scorer.check(ROW))
    known = ("openai/gsm8k", "lighteval/MATH", "aime2024", "numina_cn_k12", "codecontests", "searchR1_nq")
    assert [scorer.check(replace(ROW, data_source=source)) for source in known] == [None] * len(known)
    assert capfd.readouterr() == ("", "")  # nor is what verl prints of an empty answer


@pytest.mark.parametrize("part", ["total", "less_kl"])
def test_a_part_under_a_name_of_ours_is_refused_with_its_function(custom: Path, part: str) -> None:
    custom.write_text(f"def mine(**told):\n    return {{'score': 1, '{part}': 0}}\n")
    with pytest.raises(RewardFailed, match=rf"f\.parquet:3: mine of mine\.py sha256 \w+ gave a part named {part}"):
        checked_scores(custom_function(custom, "mine"), [told("4")])


CUSTOM = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "crash":
        raise KeyError("no such thing")
    if solution_str == "nan":
        return float("nan")
    return {"score": len(solution_str) + (solution_str == ground_truth), "length": len(solution_str), "note": "x"}

def plain(data_source, solution_str, ground_truth, extra_info=None):
    return data_source == "poimen/x" and extra_info["target_length"] == 8

async def later(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)
    return path


def test_a_custom_function_is_called_as_verl_calls_it(custom: Path) -> None:
    provider = custom_function(custom, "compute_score")
    (reward,) = provider.score([told("4")])
    assert (reward.total, dict(reward.parts)) == (2.0, {"length": 1.0})
    assert custom_function(custom, "plain").score([told("4")])[0].total == 1.0
    assert provider.identity.startswith("compute_score of mine.py sha256 ")


def test_another_text_of_the_file_is_another_identity(custom: Path) -> None:
    before = custom_function(custom, "compute_score").identity
    custom.write_text(CUSTOM + "\n# edited\n")
    assert custom_function(custom, "compute_score").identity != before


@pytest.mark.parametrize("name", ["absent", "later", "CONSTANT"])
def test_a_name_that_is_no_plain_function_is_refused(custom: Path, name: str) -> None:
    with pytest.raises(Refused, match=f"reward.custom_reward_function.name={name}"):
        custom_function(custom, name)


def test_a_file_that_does_not_load_is_refused(custom: Path) -> None:
    custom.write_text("import no_such_module\n")
    with pytest.raises(Refused, match="ModuleNotFoundError"):
        custom_function(custom, "compute_score")


@pytest.mark.parametrize(
    ("solution", "message"),
    [("crash", r"f\.parquet:3: .*raised KeyError: 'no such thing'"), ("nan", r"f\.parquet:3: .*gave total=nan")],
)
def test_a_raising_reward_and_nan_are_errors_that_name_the_row_and_never_0(
    custom: Path, solution: str, message: str
) -> None:
    with pytest.raises(RewardFailed, match=message) as failed:
        checked_scores(custom_function(custom, "compute_score"), [told("4"), told(solution)])
    assert failed.value.place == 1
    assert failed.value.exit_code == 1


class Short:
    """Gives one reward too few."""

    identity = "short/1"

    def check(self, row: RewardInput) -> str | None:  # noqa: ARG002
        return None

    def score(self, inputs: Sequence[RewardInput]) -> Sequence[Reward]:
        return [Reward(1.0)] * (len(inputs) - 1)


def test_a_provider_that_gives_too_few_rewards_is_an_error() -> None:
    with pytest.raises(RunFailed, match="short/1: got 1 rewards for 2 responses"):
        checked_scores(Short(), [ROW, ROW])


def test_weighted_providers_add_up_and_each_is_a_part() -> None:
    verifier = PerRow("maze/1", lambda item: float(item.solution == "4"))
    mixed = Weighted({"answer": (verifier, 2.0), "length": (target_length(), -0.5)})
    (reward,) = mixed.score([told("4", 6)])
    assert reward.total == 2.0 - 0.375  # 2 x 1 - 0.5 x 0.75
    assert dict(reward.parts) == {"answer": 1.0, "length": 0.75}
    assert mixed.identity == "weighted(2.0 x answer=maze/1, -0.5 x length=target_length/1)"
    assert mixed.check(replace(ROW, extra_info={})) is not None
    with pytest.raises(RewardFailed, match="maze/2 gave total=inf"):
        Weighted({"a": (PerRow("maze/2", lambda _: math.inf), 0.0)}).score([ROW])


def test_what_a_provider_is_told_has_a_hash_of_its_own() -> None:
    hashes = {told("4").sha256(), told("5").sha256(), told("4", 1).sha256(), told("4", ground_truth="5").sha256()}
    assert len(hashes) == 4
    assert told("4").sha256() == told("4").sha256()
    assert told("4", where="elsewhere").sha256() == told("4").sha256()


def test_a_run_takes_an_injected_provider_and_records_who_scored_what(tmp_path: Path) -> None:
    verifier = PerRow("maze/1", lambda item: float(len(item.solution) % 3))
    mixed = Weighted({"maze": (verifier, 1.0), "length": (target_length(), 0.5)})
    lines = ["trainer.total_training_steps=1", "trainer.val_before_train=false"]
    run(small_settings("grpo", *lines), tmp_path / "r", reward=mixed)
    records = list(read_trajectories(tmp_path / "r/trajectories/step_1.jsonl"))
    assert len(records) == 16
    for record in records:
        assert record.rewards["total"] == pytest.approx(record.rewards["maze"] + 0.5 * record.rewards["length"])
        assert record.reward_inputs is not None
        assert len(record.reward_inputs) == 64
        assert (record.update, record.policy_version) == ("fresh", 0)
        assert record.seed is not None
        assert record.turns[0].prompt_tokens > 20
        assert len(record.turns[0].log_probs) == len(record.turns[0].response_ids)
    assert [(record.group, record.sample) for record in records[:5]] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


def test_a_reward_that_is_no_number_names_its_row() -> None:
    inputs = [RewardInput(f"f.parquet:{row}", [], "s", 1, "made", "a", {}) for row in (0, 1)]
    provider = PerRow("odd/1", lambda item: 1.0 if item.where.endswith(":0") else None)  # type: ignore[arg-type,return-value]
    with pytest.raises(RewardFailed, match=r"f\.parquet:1: odd/1 raised TypeError") as failed:
        checked_scores(provider, inputs)
    assert failed.value.place == 1


def test_a_reward_that_leaves_the_program_is_a_failed_reward() -> None:
    """``sys.exit(0)`` in the user's file would end the run with exit code 0, half done."""

    def leave(_: RewardInput) -> float:
        raise SystemExit(0)

    told = RewardInput("f.parquet:3", [], "s", 1, "made", "a", {})
    with pytest.raises(RewardFailed, match=r"f\.parquet:3: leaving/1 raised SystemExit: 0"):
        checked_scores(PerRow("leaving/1", leave), [told])


def test_a_run_whose_reward_raises_ends_as_failed_and_keeps_the_responses(tmp_path: Path) -> None:
    def crash(item: RewardInput) -> float:
        raise ZeroDivisionError(item.where)

    lines = ["trainer.total_training_steps=1", "trainer.val_before_train=false"]
    with pytest.raises(RunFailed, match=r"step 1: row \d+ of .*-length-train\.parquet: broken/1 raised ZeroDivision"):
        run(small_settings("grpo", *lines), tmp_path / "r", reward=PerRow("broken/1", crash))
    records = list(read_trajectories(tmp_path / "r/trajectories/step_1.jsonl"))
    assert [record.failed is not None for record in records] == [True] + [False] * 15
    assert "total" not in records[0].rewards


def test_a_validation_whose_reward_raises_keeps_its_responses_too(tmp_path: Path) -> None:
    def crash(item: RewardInput) -> float:
        raise ZeroDivisionError(item.where)

    with pytest.raises(RunFailed, match="broken/1 raised ZeroDivision"):
        run(small_settings("grpo"), tmp_path / "r", reward=PerRow("broken/1", crash))
    records = list(read_trajectories(tmp_path / "r/trajectories/val_0.jsonl"))
    assert [record.failed is not None for record in records] == [True] + [False] * 15
