"""The core's ``generate`` on verl's client."""

from __future__ import annotations

import asyncio

import pytest
from verl_samples import Client, Output

from poimen_exp.gates.types import Generation, Prompt, Sampling
from poimen_exp.verl_backend.server import ServerGenerate

SAMPLING = Sampling(1.0, 0.7, -1, 64)


def ask(client: Client, timeout_s: float = 5.0, own_ids: str | None = None, times: int = 1) -> list[Generation]:
    generate = ServerGenerate(client, "uid7", (2,), timeout_s, own_ids)

    async def all_turns() -> list[Generation]:
        return [await generate(Prompt((1, 2, 3), 2), SAMPLING) for _ in range(times)]

    return asyncio.run(all_turns())


def test_a_turn_asks_for_log_probs_at_its_own_sampling_and_stops_at_the_models_ends() -> None:
    client = Client(Output([5, 2], [-1.0, -2.0]))
    assert ask(client) == [Generation((5, 2), (-1.0, -2.0), clipped=False)]
    params = client.requests[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["max_tokens"]) == (1.0, 0.7, -1, 64)
    assert params["stop_token_ids"] == [2]
    assert params["logprobs"] is True


def test_rollouts_of_a_group_go_to_one_server() -> None:
    client = Client(Output([2], [-1.0]))
    ask(client, times=2)
    assert [request["request_id"] for request in client.requests] == ["uid7", "uid7"]


def test_under_full_determinism_every_request_has_its_own_id() -> None:
    client = Client(Output([2], [-1.0]))
    ask(client, own_ids="uid7-3", times=2)
    assert [request["request_id"] for request in client.requests] == ["uid7-3-0", "uid7-3-1"]


def test_a_response_without_an_end_is_clipped() -> None:
    assert ask(Client(Output([5, 6], [-1.0, -2.0])))[0].clipped


def test_a_server_that_hangs_fails_the_turn_after_the_timeout() -> None:
    with pytest.raises(TimeoutError):
        ask(Client(Output([2], [-1.0]), delay_s=30.0), timeout_s=0.05)


@pytest.mark.parametrize(
    "output",
    [Output([], []), Output([5, 2], None), Output([5, 2], [-1.0]), Output([5], [-1.0], stop_reason="aborted")],
    ids=["no tokens", "no log-probs", "one log-prob too few", "aborted"],
)
def test_a_broken_answer_fails_the_turn(output: Output) -> None:
    with pytest.raises(RuntimeError, match="expected at least one token and a log-prob for each"):
        ask(Client(output))
