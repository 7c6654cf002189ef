from __future__ import annotations

import random
import stat
from itertools import islice
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from poimen_exp.gates.codec import HfCodec
from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.gates.types import ReadingTask
from poimen_exp.quickstart.coins import CoinRecipe, make_coins, right_gates
from poimen_exp.quickstart.evaluate import measure, oracle, sample_readings
from poimen_exp.quickstart.logs import Shape, log_note, sample_tasks
from poimen_exp.quickstart.model import (
    IGNORE,
    Recipe,
    Size,
    batches,
    build_network,
    build_tokenizer,
    gate_places,
    learning_rate,
    make_batch,
    response_loss,
    train,
    vocabulary_words,
)
from poimen_exp.quickstart.turns import constructed_turns

from .conftest import ASSETS

SMALL = Size(hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32)


def test_the_shipped_tokenizer_is_the_one_that_is_built(codec: HfCodec) -> None:
    built = HfCodec(build_tokenizer())
    text = "Question: where is the mail cache ?\n<think>new incomplete</think><|im_end|> 12 Zürich {cedar}"
    assert codec.encode_template(text) == built.encode_template(text)
    assert codec.encode_plain(text) == built.encode_plain(text)
    assert codec.render("x") == built.render("x") == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_every_word_and_every_tag_is_one_token(codec: HfCodec) -> None:
    tags = [f"<{slash}{name}>" for name in ("think", "check", "update", "next") for slash in ("", "/")]
    for word in (*vocabulary_words(), *tags, "<|im_end|>", "<|im_start|>", "<|endoftext|>"):
        assert len(codec.encode_template(word)) == 1, word
    assert codec.stop_ids == codec.encode_template("<|im_end|>")
    assert (codec.pad_id,) == codec.encode_template("<|endoftext|>")


def test_the_weights_are_small_readable_by_all_and_servable(network: Any) -> None:
    files = list((ASSETS / "model").iterdir())
    assert sum(file.stat().st_size for file in files) < 4_000_000
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} <= {0o644, 0o664}
    assert network.config.hidden_size // network.config.num_attention_heads >= 32
    assert network.config.model_type == "qwen2"
    weights = load_file(ASSETS / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.fixture(scope="module")
def sample(tasks: list[ReadingTask]) -> list[ReadingTask]:
    return random.Random(0).sample(tasks, 160)


def test_the_shipped_model_writes_the_form_knows_the_facts_and_gates_at_random(
    network: Any, protocol: GateProtocol, codec: HfCodec, sample: list[ReadingTask]
) -> None:
    skill = measure(sample_readings(network, protocol, sample, codec.pad_id, seed=1), protocol)
    assert skill.turns > 300
    assert skill.format_correct > 0.99  # about 500 turns and answers, each at least 0.995
    assert skill.verdict_new > 0.96
    assert skill.verdict_complete > 0.96
    assert skill.candidate > 0.94
    assert skill.answer > 0.96
    # About 80 chunks with evidence: standard deviation 0.055.
    assert skill.update_given_evidence == pytest.approx(0.5, abs=0.17)
    assert skill.update_given_none == pytest.approx(0.5, abs=0.1)
    assert skill.end_elsewhere == pytest.approx(0.4, abs=0.1)


def test_right_gates_earn_far_more_than_the_models_own(
    network: Any, protocol: GateProtocol, codec: HfCodec, sample: list[ReadingTask]
) -> None:
    own = measure(sample_readings(network, protocol, sample, codec.pad_id, seed=2), protocol)
    right = measure(sample_readings(network, protocol, sample, codec.pad_id, seed=2, override=oracle), protocol)
    assert right.exact_exit > 0.98
    assert right.outcome > own.outcome + 0.4


def test_a_measure_tells_wrong_verdicts_candidates_and_answers_from_right_ones(protocol: GateProtocol) -> None:
    from .scripted import scripted_readings

    task = next(t for t in sample_tasks(Shape(), random.Random(3)) if sum(map(bool, t.evidence)) == 1)
    right = measure(scripted_readings(task, protocol, lie=False), protocol)
    assert (right.verdict_new, right.verdict_complete, right.candidate, right.answer, right.outcome) == (1, 1, 1, 1, 1)
    assert (right.update_given_evidence, right.update_given_none, right.exact_exit) == (1, 0, 1)
    wrong = measure(scripted_readings(task, protocol, lie=True), protocol)
    assert (wrong.verdict_new, wrong.verdict_complete, wrong.candidate, wrong.answer, wrong.outcome) == (0, 0, 0, 0, 0)


def test_only_responses_are_learned(codec: HfCodec, protocol: GateProtocol) -> None:
    ids, labels = make_batch(protocol, 0, Recipe(batch=16), codec.pad_id)
    for row, target in zip(ids.tolist(), labels.tolist(), strict=True):
        learned = [token for token, label in zip(row, target, strict=True) if label != IGNORE]
        assert [label for label in target if label != IGNORE] == learned
        assert learned[-1] == codec.stop_ids[0]
        assert codec.decode(tuple(learned)).startswith(("<think>", "\\boxed{"))


def test_gates_can_be_shown_without_being_learned(codec: HfCodec, protocol: GateProtocol) -> None:
    """Of a turn all is learned but the two coins; an answer, which has no gates, is learned whole."""
    recipe = Recipe(batch=32)
    ids, labels = make_batch(protocol, 0, recipe, codec.pad_id)
    same, masked = make_batch(protocol, 0, recipe, codec.pad_id, gates=False)
    assert torch.equal(ids, same)
    left_out = (labels != masked).sum(1).tolist()
    texts = [codec.decode(tuple(row[row != IGNORE].tolist())) for row in labels]
    assert left_out == [2 if text.startswith("<think>") else 0 for text in texts]
    assert set(left_out) == {0, 2}
    assert {codec.decode((token,)) for token in ids[labels != masked].tolist()} == {"yes", "no", "continue", "end"}
    assert (masked[labels != masked] == IGNORE).all()


def test_the_main_training_does_not_learn_the_coins(protocol: GateProtocol, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def spied(*arguments: Any, gates: bool = True) -> Any:
        asked.append(gates)
        return batches(*arguments, gates=gates)

    monkeypatch.setattr("poimen_exp.quickstart.model.batches", spied)
    train(build_network(build_tokenizer(), SMALL, 0), protocol, Recipe(steps=1, batch=2), "cpu", lambda *_: None)
    assert asked == [False]


def test_right_gates_say_what_the_verdict_says_and_change_nothing_else(codec: HfCodec, protocol: GateProtocol) -> None:
    ids, labels = make_batch(protocol, 0, Recipe(batch=64), codec.pad_id)
    right = right_gates(ids, protocol)
    _, masked = make_batch(protocol, 0, Recipe(batch=64), codec.pad_id, gates=False)
    gates = labels != masked
    assert torch.equal(right[~gates], ids[~gates])
    seen = set()
    for row, mine in zip(right, gates, strict=True):
        if mine.any():
            text = codec.decode(tuple(row[row != codec.pad_id].tolist())).rsplit("assistant", 1)[1]
            new, complete = "<think>new" in text, " complete" in text
            said = tuple(codec.decode((token,)) for token in row[mine].tolist())
            assert said == ("yes" if new else "no", "end" if complete else "continue")
            seen.add(said)
    assert len(seen) >= 3


@pytest.mark.parametrize(("right", "tossed", "changed"), [(1, 0, "everything"), (0, 1, "the last layer")])
def test_coins_are_tossed_by_the_last_layer_alone(
    protocol: GateProtocol, right: int, tossed: int, changed: str
) -> None:
    size = Size(hidden=32, layers=2, heads=1, kv_heads=1, intermediate=32)
    network = build_network(build_tokenizer(), size, 0)
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    coins = CoinRecipe(batch=4, right_steps=right, coin_steps=tossed)
    make_coins(network, protocol, Recipe(), "cpu", lambda *_: None, coins)
    moved = {name for name, value in network.named_parameters() if not torch.equal(value, before[name])}
    last = {name for name in before if "layers.1." in name}
    assert moved == (set(before) if changed == "everything" else last)
    assert all(value.requires_grad for value in network.parameters())


def test_right_gates_are_learned_first_and_coins_after_them(
    protocol: GateProtocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spied(network: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        learned.append((ids, labels))
        return response_loss(network, ids, labels)

    monkeypatch.setattr("poimen_exp.quickstart.coins.response_loss", spied)
    coins = CoinRecipe(batch=64, right_steps=1, coin_steps=1)
    make_coins(build_network(build_tokenizer(), SMALL, 0), protocol, Recipe(), "cpu", lambda *_: None, coins)
    (right, _), (tossed, _) = learned
    assert len(right) == len(tossed) == 64
    for ids, labels in learned:  # the gates too
        assert torch.equal(labels[labels != IGNORE], ids[labels != IGNORE])
        assert (labels[gate_places(ids, protocol)] != IGNORE).all()
    assert torch.equal(right, right_gates(right, protocol))
    assert not torch.equal(tossed, right_gates(tossed, protocol))


def test_batches_in_order_are_those_of_make_batch(codec: HfCodec, protocol: GateProtocol) -> None:
    recipe = Recipe(steps=2, batch=4)
    for gates in (True, False):
        for step, pair in enumerate(batches(protocol, recipe, progress=1.0, gates=gates)):
            wanted = make_batch(protocol, step, recipe, codec.pad_id, 1.0, gates)
            assert all(torch.equal(a, b) for a, b in zip(pair, wanted, strict=True))


def test_a_batch_is_a_function_of_seed_and_step(codec: HfCodec, protocol: GateProtocol) -> None:
    def batch(seed: int, step: int) -> list[list[int]]:
        rows: list[list[int]] = make_batch(protocol, step, Recipe(batch=8, seed=seed), codec.pad_id)[0].tolist()
        return rows

    assert batch(1, 5) == batch(1, 5)
    assert batch(1, 5) != batch(1, 6)
    assert batch(1, 5) != batch(2, 5)


def test_padding_on_the_right_changes_no_loss(codec: HfCodec, protocol: GateProtocol) -> None:
    network = build_network(build_tokenizer(), SMALL, 0).eval()
    ids, labels = make_batch(protocol, 0, Recipe(batch=4), codec.pad_id)
    wider = torch.nn.functional.pad(ids, (0, 7), value=codec.pad_id)
    masked = torch.nn.functional.pad(labels, (0, 7), value=IGNORE)
    with torch.no_grad():
        narrow, wide = (float(response_loss(network, *pair)) for pair in ((ids, labels), (wider, masked)))
    assert narrow == pytest.approx(wide, abs=1e-5)


def test_each_response_token_is_predicted_from_the_token_before_it() -> None:
    network = build_network(build_tokenizer(), SMALL, 0).eval()
    ids, labels = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[IGNORE, IGNORE, 7, 8]])
    with torch.no_grad():
        log_probs = network(input_ids=ids).logits[0].log_softmax(-1)
        loss = float(response_loss(network, ids, labels))
    assert loss == pytest.approx(-float(log_probs[1, 7] + log_probs[2, 8]) / 2, abs=1e-5)


def test_the_learning_rate_warms_up_and_falls_to_a_hundredth() -> None:
    recipe = Recipe(steps=1000, lr=1.0, warmup_steps=100)
    assert learning_rate(0, recipe) == 0.01
    assert learning_rate(99, recipe) == 1.0
    assert learning_rate(550, recipe) == pytest.approx(0.01 + 0.99 * 0.5)  # half-way down the cosine
    assert learning_rate(1000, recipe) == pytest.approx(0.01)


def test_training_lowers_the_loss(protocol: GateProtocol) -> None:
    losses: list[float] = []
    network = build_network(build_tokenizer(), SMALL, 0)
    recipe = Recipe(steps=30, batch=8, lr=1e-2, warmup_steps=1)
    train(network, protocol, recipe, "cpu", lambda _, loss: losses.append(loss), every=10)
    assert len(losses) == 3
    assert losses[2] < 0.75 * losses[0]


def test_the_model_prefers_the_right_verdict_and_candidate_of_constructed_turns(
    network: Any, protocol: GateProtocol, codec: HfCodec
) -> None:
    """Teacher-forced, without sampling: mean log-prob of what the gates do not decide is near 0."""
    rng = random.Random(4)
    coins = {codec.encode_plain(word)[0] for word in ("yes", "no", "continue", "end")}
    total, count = 0.0, 0
    for task in islice(sample_tasks(Shape(), rng), 8):
        for prompt, response in constructed_turns(task, protocol, rng, gates="random", note=log_note):
            ids = torch.tensor([(*prompt, *response)])
            with torch.no_grad():
                log_probs = network(input_ids=ids).logits[0].log_softmax(-1)
            for place, token in enumerate(response, start=len(prompt)):
                if token not in coins:
                    total, count = total + float(log_probs[place - 1, token]), count + 1
    assert count > 400
    assert total / count > -0.05
