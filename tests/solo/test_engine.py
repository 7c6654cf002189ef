"""The transformers engine: what it samples, what it records, and that neighbours in a batch change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from poimen_exp.errors import RunFailed
from poimen_exp.gates.types import Generation, Prompt, Sampling
from poimen_exp.solo import engine as engine_module
from poimen_exp.solo.decode import Decoder
from poimen_exp.solo.engine import Request, TransformersEngine
from poimen_exp.solo.readers import StraightReader
from poimen_exp.solo.sampling import draw
from poimen_exp.solo.seeds import stream

from .support import PAD, plain_log_probs, row

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=12)
FREE = Sampling(temperature=0.7, top_p=1.0, top_k=-1, max_tokens=12)
STOP = 2
PROMPTS = [
    Prompt((10, 11, 12, 13, 20), 4),
    Prompt((14, 15, 26), 2),
    Prompt((10, 11, 12, 13, 21, 22, 23), 4),
    Prompt((10, 11, 12, 13, 20), 4),
    Prompt((16, 17, 18), 0),
]


def generate(
    model: Any,
    prompts: list[Prompt],
    sampling: Sampling = FREE,
    stop: tuple[int, ...] = (STOP,),
    max_rows: int = 64,
    place: str = "a",
) -> list[Generation]:
    engine = TransformersEngine(model, stop, PAD, max_rows)
    return engine.generate([Request(prompt, sampling) for prompt in prompts], stream(0, place))


def greedy_alone(model: Any, prompt: Prompt, stop: tuple[int, ...] = (STOP,), longest: int = 12) -> tuple[int, ...]:
    """The likeliest ids, one forward of the whole sequence a token."""
    ids = list(prompt.ids)
    with torch.no_grad():
        for _ in range(longest):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in stop:
                break
    return tuple(ids[len(prompt.ids) :])


def test_greedy_ids_are_those_of_one_prompt_at_a_time(tiny_model: Any) -> None:
    expected = [greedy_alone(tiny_model, prompt) for prompt in PROMPTS]
    assert [item.ids for item in generate(tiny_model, PROMPTS, GREEDY)] == expected
    assert [item.ids for item in generate(tiny_model, PROMPTS, GREEDY, max_rows=2)] == expected


def test_greedy_log_probs_are_those_of_temperature_one(tiny_model: Any) -> None:
    for prompt, item in zip(PROMPTS, generate(tiny_model, PROMPTS, GREEDY), strict=True):
        with torch.no_grad():
            plain = plain_log_probs(tiny_model, row(prompt.ids, 0, item.ids), temperature=1.0)
        assert torch.tensor(item.log_probs) == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize(
    "sampling", [FREE, replace(FREE, top_p=0.5), replace(FREE, top_k=3), replace(FREE, temperature=1.3)]
)
def test_sampled_log_probs_equal_the_trainers(tiny_model: Any, sampling: Sampling) -> None:
    """At the sampling temperature, over the whole vocabulary, also under top-p and top-k."""
    for prompt, item in zip(PROMPTS, generate(tiny_model, PROMPTS, sampling), strict=True):
        with torch.no_grad():
            plain = plain_log_probs(tiny_model, row(prompt.ids, 0, item.ids), sampling.temperature)
        assert torch.tensor(item.log_probs) == pytest.approx(plain, abs=1e-4)
        assert len(item.ids) == len(item.log_probs)


def test_finished_rows_leave_and_the_others_go_on(tiny_model: Any) -> None:
    """Every id that some row writes first ends it: rows end at different places, and compaction drops them."""
    free = [greedy_alone(tiny_model, prompt) for prompt in PROMPTS]
    stop = tuple({ids[place] for ids, place in zip(free, (0, 1, 4, 7, 11), strict=True)} | {STOP})
    expected = [greedy_alone(tiny_model, prompt, stop) for prompt in PROMPTS]
    assert len({len(ids) for ids in expected}) > 2
    got = generate(tiny_model, PROMPTS, GREEDY, stop)
    assert [item.ids for item in got] == expected
    assert [item.clipped for item in got] == [ids[-1] not in stop for ids in expected]


def test_finished_rows_are_forwarded_no_more(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = step_sizes(monkeypatch)
    free = [greedy_alone(tiny_model, prompt) for prompt in PROMPTS]
    assert free[0][0] != free[4][1]
    generate(tiny_model, PROMPTS, GREEDY, stop=(free[0][0], free[4][1]))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] <= 3  # the two rows of the first prompt ended with their first id
    assert widths[-1] < widths[0] or len(widths) == 1


def step_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every decoding step from here on, in a list that grows."""
    widths: list[int] = []
    plain = Decoder._one_step

    def counted(self: Decoder, rows: int, columns: int) -> torch.Tensor:
        widths.append(rows)
        return plain(self, rows, columns)

    monkeypatch.setattr(Decoder, "_one_step", counted)
    return widths


def test_waiting_prompts_take_the_slots_of_finished_rows(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots, five prompts of unequal responses: a slot stands empty for a step where a first id ends a row, and
    at the end."""
    widths = step_sizes(monkeypatch)
    free = [greedy_alone(tiny_model, prompt) for prompt in PROMPTS]
    stop = tuple({ids[place] for ids, place in zip(free, (3, 1, 4, 3, 7), strict=True)} | {STOP})
    expected = [greedy_alone(tiny_model, prompt, stop) for prompt in PROMPTS]
    assert [item.ids for item in generate(tiny_model, PROMPTS, GREEDY, stop, max_rows=2)] == expected
    # Of each response the first id comes with the prompt, the others with a step each.
    assert sum(widths) == sum(len(ids) - 1 for ids in expected)
    assert widths.count(2) > widths.count(1)


def test_rows_of_every_length_join_leave_and_move_without_a_trace(tiny_model: Any) -> None:
    """Forty prompts of 1 to 60 ids over five slots: rows that take a gap have written more or less than their
    neighbours, and a slot has held rows of other lengths before."""
    source = torch.Generator().manual_seed(5)
    prompts = []
    for place in range(40):
        width = int(torch.randint(1, 60, (), generator=source))
        ids = torch.randint(10, 260, (width,), generator=source).tolist()
        prompts.append(Prompt((*(50 + place % 7 for _ in range(3)), *ids), 3 if place % 3 else 0))
    stop = tuple(range(10, 260, 9))
    expected = [greedy_alone(tiny_model, prompt, stop, 20) for prompt in prompts]
    assert len({len(ids) for ids in expected}) > 8
    got = generate(tiny_model, prompts, replace(GREEDY, max_tokens=20), stop, max_rows=5)
    assert [item.ids for item in got] == expected
    assert [len(item.log_probs) for item in got] == [len(ids) for ids in expected]


def test_whoever_is_answered_may_ask_again_at_once(tiny_model: Any) -> None:
    """Three conversations of three turns, each turn's prompt holding what was written before; one slot short."""
    turns: dict[int, list[Generation]] = {0: [], 1: [], 2: []}

    def prompt_of(key: int) -> Prompt:
        said = sum((item.ids for item in turns[key]), ())
        return Prompt((*PROMPTS[key].ids, *said, 30 + key), PROMPTS[key].shared)

    def follow(key: int, generation: Generation) -> Request | None:
        turns[key].append(generation)
        return Request(prompt_of(key), GREEDY) if len(turns[key]) < 3 else None

    engine = TransformersEngine(tiny_model, (STOP,), PAD, max_rows=2)
    engine.serve({key: Request(prompt_of(key), GREEDY) for key in turns}, follow, stream(0, "a"))
    for key, found in turns.items():
        assert len(found) == 3
        turns[key] = []
        for item in found:
            assert item.ids == greedy_alone(tiny_model, prompt_of(key)), key
            turns[key].append(item)


def test_a_prefix_is_read_once_however_late_its_rollouts_come(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = StraightReader.prefixes

    def counted(
        self: StraightReader, ids: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        read.append(int(mask.sum()))
        return plain(self, ids, mask, lengths)

    monkeypatch.setattr(StraightReader, "prefixes", counted)
    generate(tiny_model, PROMPTS, GREEDY, max_rows=1)
    # Distinct prefixes: four ids (three prompts), two ids (one); the last prompt shares nothing.
    assert sum(read) == 6


def test_a_longer_prompt_later_gets_its_room(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, (STOP,), PAD, 64)
    long = Prompt(tuple(range(10, 200)), 100)
    for prompt in (PROMPTS[1], long, PROMPTS[1]):
        (item,) = engine.generate([Request(prompt, GREEDY)], stream(0, "a"))
        assert item.ids == greedy_alone(tiny_model, prompt)
    got: dict[int, tuple[int, ...]] = {}

    def follow(key: int, generation: Generation) -> Request | None:
        if key in got:
            assert generation.ids == greedy_alone(tiny_model, long)
            return None
        got[key] = generation.ids
        return Request(long, GREEDY)

    small = TransformersEngine(tiny_model, (STOP,), PAD, 64)
    small.serve({0: Request(PROMPTS[0], GREEDY), 1: Request(PROMPTS[1], GREEDY)}, follow, stream(0, "a"))
    assert got == {key: greedy_alone(tiny_model, PROMPTS[key]) for key in (0, 1)}


@pytest.mark.parametrize("over", [0, 1, 2])
def test_a_row_at_the_very_end_of_the_slots_is_whole(tiny_model: Any, over: int) -> None:
    """63 columns hold 51 prompt ids and 12 sampled ones; one more waits until the slots are made anew."""
    edge = Prompt(tuple(range(10, 61 + over)), 4)
    endless = tuple(range(900, 903))
    got: list[tuple[int, tuple[int, ...]]] = []

    def follow(key: int, generation: Generation) -> Request | None:
        got.append((key, generation.ids))
        return Request(edge, GREEDY) if key == 1 and len([k for k, _ in got if k == 1]) == 1 else None

    engine = TransformersEngine(tiny_model, endless, PAD, 64)
    engine.serve({key: Request(PROMPTS[key], GREEDY) for key in (0, 1)}, follow, stream(0, "a"))
    assert got[-1] == (1, greedy_alone(tiny_model, edge, endless))


def test_nothing_of_old_weights_is_read_after_an_update(tiny_model: Any) -> None:
    """Keys and values of a prefix are those of the weights that read it: the next call reads it anew."""
    model = copy.deepcopy(tiny_model)
    engine = TransformersEngine(model, (STOP,), PAD, 64)
    requests = [Request(prompt, GREEDY) for prompt in PROMPTS]
    before = engine.generate(requests, stream(0, "a"))
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1.0)
    after = engine.generate(requests, stream(0, "a"))
    assert [item.ids for item in after] == [greedy_alone(model, prompt) for prompt in PROMPTS]
    assert after != before


def test_prompts_beyond_the_prefill_budget_are_read_in_parts(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [item.ids for item in generate(tiny_model, PROMPTS, GREEDY)]
    monkeypatch.setattr(engine_module, "_PREFILL_TOKENS", 3)
    monkeypatch.setattr(engine_module, "_KEPT_PREFIX_TOKENS", 1)
    assert [item.ids for item in generate(tiny_model, PROMPTS, GREEDY)] == expected


@pytest.mark.gpu
def test_a_recorded_step_gives_what_the_step_gives(tiny_model: Any, require: Callable[[str, str | None], None]) -> None:
    require("gpu", None if torch.cuda.is_available() else "torch sees none")
    expected = [greedy_alone(tiny_model, prompt) for prompt in PROMPTS * 6]
    device = torch.device("cuda")
    engine = TransformersEngine(copy.deepcopy(tiny_model).to(device), (STOP,), PAD, 8)
    for _ in range(2):  # the second time nothing is left to record
        got = engine.generate([Request(prompt, GREEDY) for prompt in PROMPTS * 6], stream(0, "a", device=device))
        assert [item.ids for item in got] == expected


@pytest.mark.gpu
def test_slots_that_grow_are_recorded_again(tiny_model: Any, require: Callable[[str, str | None], None]) -> None:
    """Every growth frees all recordings, and with the last one the memory that they shared."""
    require("gpu", None if torch.cuda.is_available() else "torch sees none")
    device = torch.device("cuda")
    engine = TransformersEngine(copy.deepcopy(tiny_model).to(device), (STOP,), PAD, 8)
    for most in (4, 100, 300):
        request = Request(PROMPTS[0], replace(GREEDY, max_tokens=most))
        (got,) = engine.generate([request], stream(0, "a", device=device))
        assert got.ids[:4] == greedy_alone(tiny_model, PROMPTS[0], longest=4)


def test_a_length_limit_clips(tiny_model: Any) -> None:
    got = generate(tiny_model, PROMPTS, replace(GREEDY, max_tokens=3), stop=(999,))
    assert [(len(item.ids), item.clipped) for item in got] == [(3, True)] * 5


def test_an_end_at_the_very_limit_is_not_clipped(tiny_model: Any) -> None:
    third = greedy_alone(tiny_model, PROMPTS[0], stop=())[2]
    (item,) = generate(tiny_model, PROMPTS[:1], replace(GREEDY, max_tokens=3), stop=(third,))
    assert (item.ids[-1], item.clipped) == (third, False)


def test_the_generator_is_the_only_source_of_randomness(tiny_model: Any) -> None:
    first = generate(tiny_model, PROMPTS)
    torch.manual_seed(99)
    assert generate(tiny_model, PROMPTS) == first
    assert generate(tiny_model, PROMPTS, place="b") != first


def test_rollouts_of_one_prompt_differ(tiny_model: Any) -> None:
    assert len({item.ids for item in generate(tiny_model, PROMPTS[:1] * 8)}) > 4


def test_requests_of_several_samplings_keep_their_order(tiny_model: Any) -> None:
    engine = TransformersEngine(tiny_model, (STOP,), PAD, 64)
    short = replace(GREEDY, max_tokens=2)
    requests = [Request(prompt, short if place % 2 else GREEDY) for place, prompt in enumerate(PROMPTS)]
    got = engine.generate(requests, stream(0, "a"))
    expected = [greedy_alone(tiny_model, p, longest=2 if place % 2 else 12) for place, p in enumerate(PROMPTS)]
    assert [item.ids for item in got] == expected


def test_nothing_asked_is_nothing_generated(tiny_model: Any) -> None:
    assert generate(tiny_model, []) == []


def frequencies(sampling: Sampling, draws: int = 20_000) -> list[float]:
    """How often each of four ids of probabilities 0.5, 0.25, 0.15, 0.1 is drawn."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().expand(draws, 4)
    token, log_probs = draw(logits, sampling, stream(0, "draw"))
    if sampling.temperature == 1.0:  # whatever is filtered
        assert torch.allclose(log_probs, logits[0][token], atol=1e-5)
    return (torch.bincount(token, minlength=4) / draws).tolist()


def test_temperature_shapes_the_draws() -> None:
    # Tolerance: four standard errors of 20,000 draws are 0.015.
    assert frequencies(replace(FREE, temperature=1.0)) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.015)
    # At temperature 0.5 probabilities are squared: 0.25, 0.0625, 0.0225, 0.01 of 0.345.
    expected = [0.7246, 0.1812, 0.0652, 0.0290]
    assert frequencies(replace(FREE, temperature=0.5)) == pytest.approx(expected, abs=0.015)
    assert frequencies(replace(FREE, temperature=0.0)) == [1.0, 0.0, 0.0, 0.0]


def test_top_k_keeps_the_likeliest() -> None:
    found = frequencies(replace(FREE, temperature=1.0, top_k=2))
    assert found == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.015)
    assert found[2:] == [0.0, 0.0]


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.7, 2), (0.76, 3), (0.95, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    found = frequencies(replace(FREE, temperature=1.0, top_p=top_p))
    assert [value > 0 for value in found] == [place < kept for place in range(4)]
    probs = [0.5, 0.25, 0.15, 0.1][:kept]
    assert found[:kept] == pytest.approx([value / sum(probs) for value in probs], abs=0.015)


def test_top_p_stops_at_the_id_that_reaches_it() -> None:
    token, _ = draw(torch.zeros(4000, 2), replace(FREE, temperature=1.0, top_p=0.5), stream(0, "draw"))
    assert len(set(token.tolist())) == 1  # each has half: the first already reaches it


def test_top_p_counts_what_top_k_left() -> None:
    # Of the two kept by top-k (2/3, 1/3), the first already reaches 0.6.
    assert frequencies(replace(FREE, temperature=1.0, top_k=2, top_p=0.6)) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("logit", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_diverged_are_told_and_give_no_id(logit: float, temperature: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 3] = logit
    with pytest.raises(RunFailed, match="logits are not finite: its weights have diverged"):
        draw(logits, replace(FREE, temperature=temperature), stream(0, "draw"))


def test_an_id_that_cannot_be_drawn_has_no_part_in_that() -> None:
    logits = torch.zeros(1, 3)
    logits[0, 0] = -torch.inf
    token, _ = draw(logits, replace(FREE, temperature=0.0), stream(0, "draw"))
    assert token.tolist() == [1]
