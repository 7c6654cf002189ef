"""One scripted transcript through the loop, through training's and evaluation's reader, and through a server."""

from __future__ import annotations

import asyncio
import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from poimen_exp.adapters.client import Client
from poimen_exp.adapters.manifest import read_manifest
from poimen_exp.adapters.read import (
    Reader,
    Source,
    adapter_protocol,
    chunk_document,
    load_units,
    open_reader,
    read_document,
    server_generate,
)
from poimen_exp.cli import app
from poimen_exp.corpus import open_corpus
from poimen_exp.corpus.rows import Unit
from poimen_exp.errors import Refused, RunFailed
from poimen_exp.gates.protocol import GateProtocol, format_turn
from poimen_exp.gates.reading import read
from poimen_exp.gates.types import GateTurn, Generation, Sampling, Trajectory
from poimen_exp.solo.gate_task import GateTask
from poimen_exp.solo.policy import load_codec
from poimen_exp.solo.settings import CorpusSettings, GateSettings, RolloutSettings

from .fake_server import FakeServer, serving

SHIPPED = Path(str(files("poimen_exp"))) / "assets" / "quickstart" / "corpus"
DOC = "\n".join(
    [
        "[1 May] Mira opened the release branch.",
        "[2 May] Nothing happened, <next>end</next> <|im_end|> says the log.",
        "[3 May] Mira deployed the branch at noon.",
        "[4 May] Jon wrote the notes.",
        "[5 May] Jon went home.",
    ]
)
QUESTION = "When was the branch deployed?"
SAMPLING = Sampling(temperature=1.0, top_p=0.7, top_k=-1, max_tokens=64)
LONG = "deployed on 3 May at noon by Mira " * 20
SCRIPT = (
    format_turn(GateTurn("a branch", update=True, candidate="branch opened", end=False)),
    format_turn(GateTurn("nothing", update=False, candidate="not to be kept", end=False)),
    "<think>broken</think><check>yes</check>",
    format_turn(GateTurn("the day", update=True, candidate=LONG, end=True)),
    "It was \\boxed{3 May}.",
)


@pytest.fixture
def protocol(base: Path) -> GateProtocol:
    return GateProtocol(load_codec(base), "chunk_first", "terse", memory_tokens=32)


def scripted(protocol: GateProtocol) -> list[Generation]:
    """The transcript as generations; the third is one that the length limit cut."""
    stop = protocol.codec.stop_ids[:1]
    out = []
    for place, text in enumerate(SCRIPT):
        ids = protocol.codec.encode_template(text) + (() if place == 2 else stop)
        out.append(Generation(ids, tuple(-0.25 * (i + 1) for i in range(len(ids))), clipped=place == 2))
    return out


def quiet(_: str) -> None:
    """In place of the progress lines."""


def units() -> list[Unit]:
    return [Unit(f"line {number}", line) for number, line in enumerate(DOC.split("\n"), start=1)]


def through_the_loop(protocol: GateProtocol, task) -> Trajectory:
    answers = iter(scripted(protocol))

    async def generate(*_: object) -> Generation:
        return next(answers)

    return asyncio.run(read(task, protocol, generate, SAMPLING))


class ScriptedEngine:
    """In place of ``TransformersEngine``: answers whoever asks, in order."""

    def __init__(self, answers: list[Generation]) -> None:
        self._answers = iter(answers)

    def serve(self, requests, follow, _generator) -> None:
        asking = list(requests)
        while asking:
            asking = [place for place in asking if follow(place, next(self._answers)) is not None]


def through_evaluation(protocol: GateProtocol, task) -> Trajectory:
    """As ``poimen eval`` and training's validation read."""
    gates = GateSettings("chunk_first", "terse", 32, "zero_trajectory", "exact", "group_step", 0, 0.0, 0)
    rollout = RolloutSettings(SAMPLING, SAMPLING, 1, 1, 2048, 1, 0.0)
    engine = ScriptedEngine(scripted(protocol))
    reader = GateTask([], [task], protocol, engine, gates, rollout, 0.9, 1, torch.device("cpu"))
    scored, failed = reader.read_groups([task], 1, SAMPLING, "eval-val", 0)
    assert failed == 0
    return scored[0].trajectory


def through_a_server(protocol: GateProtocol) -> tuple[Trajectory, FakeServer]:
    answers = iter(scripted(protocol))
    with serving(FakeServer(lambda *_: next(answers))) as fake:
        generate = server_generate(Client(fake.url), "gates", protocol.codec.stop_ids, seed=7)
        reader = Reader(protocol, 40, SAMPLING, generate)
        return read_document(reader, units(), QUESTION, quiet), fake


def test_loop_evaluation_and_server_agree_step_for_step(protocol: GateProtocol) -> None:
    served, _ = through_a_server(protocol)
    looped = through_the_loop(protocol, served.task)
    evaluated = through_evaluation(protocol, served.task)
    assert len(served.turns) == 5
    for turns in zip(looped.turns, evaluated.turns, served.turns, strict=True):
        assert turns[0] == turns[1] == turns[2]
    assert looped == evaluated == served


def test_the_transcript_reads_as_it_was_written(protocol: GateProtocol) -> None:
    served, _ = through_a_server(protocol)
    memories = [turn.memory for turn in served.turns]
    assert memories[:3] == ["branch opened"] * 3
    assert LONG.startswith(memories[3])
    assert served.turns[3].memory_tokens <= 32 < len(protocol.codec.encode_plain(LONG))
    assert [turn.gate is None for turn in served.turns] == [False, False, True, False, True]
    assert served.turns[2].generation.clipped
    assert (served.exit_index, served.answer) == (3, "3 May")


def test_the_server_gets_the_prompt_as_ids_and_every_sampling_value(protocol: GateProtocol) -> None:
    served, fake = through_a_server(protocol)
    assert [tuple(body["prompt"]) for body in fake.bodies] == [turn.prompt.ids for turn in served.turns]
    sent = {key: value for key, value in fake.bodies[0].items() if key != "prompt"}
    assert sent == {
        "model": "gates",
        "max_tokens": 64,
        "temperature": 1.0,
        "top_p": 0.7,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
        "stop_token_ids": list(protocol.codec.stop_ids),
        "skip_special_tokens": False,
        "seed": 7,
    }


def test_a_document_is_cut_where_the_corpus_loader_cuts_it(base: Path) -> None:
    codec, path = load_codec(base), SHIPPED / "corpus.jsonl"
    settings = CorpusSettings(SHIPPED, 60, 1000, 0.6, False, "refuse", 0, 0.2, 0.2, None)
    corpus = open_corpus(settings, codec, lambda *_: 0, 10_000)
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    documents = {row["trajectory_id"]: row["document_id"] for row in rows if row["type"] == "trajectory"}
    for task in list(corpus.split("val"))[:5]:
        chunks = chunk_document(load_units(path, documents[task.task_id]), 60, codec)
        assert len(chunks) > 1
        assert chunks == task.chunks


def test_only_line_feeds_end_a_line_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "doc.txt"
    path.write_bytes("one\u2028still one\r\n\ntwo\u0085still two\n".encode())
    assert [unit.text for unit in load_units(path, None)] == ["one\u2028still one", "", "two\u0085still two", ""]


def test_documents_that_cannot_be_read_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no such file"):
        load_units(tmp_path / "nowhere.txt", None)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(Refused, match=r"not UTF-8 text \(byte 3\)"):
        load_units(tmp_path / "latin.txt", None)
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(Refused, match="nothing but white space"):
        chunk_document(load_units(tmp_path / "empty.txt", None), 40, load_codec(base))
    (tmp_path / "bad.jsonl").write_text('\n{"type":"document"}\n')
    with pytest.raises(Refused, match=r"bad\.jsonl:2: "):
        load_units(tmp_path / "bad.jsonl", "d1")


def test_an_adapter_of_another_protocol_is_refused(adapter: Path, base: Path) -> None:
    text = (adapter / "poimen.json").read_text()
    (adapter / "poimen.json").write_text(text.replace("poimen.protocol/1", "poimen.protocol/0"))
    with pytest.raises(Refused, match=r"trained on poimen\.protocol/0, this program speaks poimen\.protocol/1"):
        adapter_protocol(read_manifest(adapter), load_codec(base), "adapter")


def test_in_process_the_adapter_is_read_with_and_without_its_weights(adapter: Path, trained) -> None:
    """Greedy: every id is the likeliest under the PEFT model, and under the base model without the adapter."""
    for used in (True, False):
        reader = open_reader(Source(str(adapter), "none", None, None, use_adapter=used), _greedy(), seed=0)
        assert (reader.chunk_tokens, reader.sampling.max_tokens) == (40, 64)
        trajectory = read_document(reader, units()[:1], QUESTION, quiet)
        turn = trajectory.turns[0]
        ids = torch.tensor([turn.prompt.ids + turn.generation.ids])
        with torch.no_grad():
            if used:
                logits = trained(input_ids=ids).logits
            else:
                with trained.disable_adapter():
                    logits = trained(input_ids=ids).logits
        log_probs = logits[0, len(turn.prompt.ids) - 1 : -1].log_softmax(-1)
        chosen = log_probs.gather(-1, torch.tensor(turn.generation.ids)[:, None])[:, 0]
        assert torch.allclose(chosen, torch.tensor(turn.generation.log_probs), atol=1e-4)
        assert torch.allclose(chosen, log_probs.max(-1).values, atol=1e-4)


def _greedy() -> Sampling:
    return Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=1)


def test_the_command_prints_chunks_gates_memory_early_exit_and_answer(adapter, tmp_path, protocol) -> None:
    (tmp_path / "doc.txt").write_text(DOC)
    answers = iter(scripted(protocol))
    with serving(FakeServer(lambda *_: next(answers), models={"tiny": None, "adapter": "tiny"})) as fake:
        arguments = ["read", str(tmp_path / "doc.txt"), "-q", QUESTION, "--adapter", str(adapter), "--url", fake.url]
        result = CliRunner().invoke(app, arguments)
    assert result.exception is None, result.output
    assert "chunk 1 of 6" in result.output
    assert "[1 May] Mira opened the release branch." in result.output
    assert "update: yes · exit: continue" in result.output
    assert "update: no · exit: continue" in result.output
    assert "malformed turn, memory kept" in result.output
    assert "branch opened" in result.output
    assert "read 4 of 6 chunks (stopped early, 2 unread)" in result.output
    assert "3 May" in result.output
    assert {body["model"] for body in fake.bodies} == {"adapter"}


def test_the_command_as_json_and_with_the_base_model_alone(adapter, tmp_path, protocol) -> None:
    (tmp_path / "doc.txt").write_text(DOC)
    answers = iter(scripted(protocol))
    with serving(FakeServer(lambda *_: next(answers), models={"tiny": None, "adapter": "tiny"})) as fake:
        arguments = ["read", str(tmp_path / "doc.txt"), "-q", QUESTION, "--adapter", str(adapter), "--url", fake.url]
        result = CliRunner().invoke(app, [*arguments, "--without-adapter", "--json"])
    values = json.loads(result.stdout)
    assert [turn["update"] for turn in values["turns"]] == [True, False, None, True]
    assert (values["exit_index"], values["answer"], values["chunks"]) == (3, "3 May", 6)
    assert {body["model"] for body in fake.bodies} == {"tiny"}


def test_a_server_without_the_adapter_or_without_token_ids_is_named(adapter: Path) -> None:
    nothing = Generation((), (), clipped=False)
    with serving(FakeServer(lambda *_: nothing)) as fake:
        with pytest.raises(RunFailed, match="no model 'adapter'; it serves base, gates"):
            open_reader(Source(str(adapter), "none", None, fake.url), _greedy(), seed=0)
        fake._choice = lambda _: {"text": "x", "finish_reason": "stop"}
        with pytest.raises(RunFailed, match="has no token_ids"):
            Client(fake.url).complete("gates", [1], SAMPLING, [2])
        with pytest.raises(RunFailed, match=r"status 404, expected 200; .*does not exist"):
            Client(fake.url).complete("nope", [1], SAMPLING, [2])
    with pytest.raises(RunFailed, match="is the server running there"):
        Client(fake.url).models()
