"""What the tiny model can do, measured by sampling real readings: verdicts, candidates, answers, gates, outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from poimen_exp.gates.protocol import FIRST_MEMORY, GateProtocol
from poimen_exp.gates.reading import GateOverride, read
from poimen_exp.gates.types import GateTurn, Generation, Prompt, ReadingTask, Sampling, Trajectory, Turn
from poimen_exp.quickstart.logs import asked_pairs, log_note
from poimen_exp.quickstart.turns import merge_memory, parse_verdict
from poimen_exp.quickstart.words import UNKNOWN

if TYPE_CHECKING:
    import torch

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=48)


@dataclass(frozen=True)
class Skill:
    """Means over the turns of some readings; ``turns`` and ``readings`` are the denominators."""

    readings: int
    turns: int
    format_correct: float
    """Turns and answers that parsed."""
    verdict_new: float
    """Turns whose verdict is right about the chunk."""
    verdict_complete: float
    """Turns whose verdict is right about memory and chunk together."""
    candidate: float
    """Turns whose candidate is the old memory and the chunk's facts, and nothing else."""
    answer: float
    """Answers that say what the memory holds (``unknown`` where it lacks something)."""
    update_given_evidence: float
    update_given_none: float
    """Rate of ``check=yes`` on the two kinds of chunk: equal for gates that are coins."""
    end_at_target: float
    end_elsewhere: float
    outcome: float
    """Readings with the right answer."""
    exact_exit: float
    chunks_read: float

    def lines(self) -> str:
        """One ``name value`` a line."""
        return "\n".join(f"{name:24} {value:.4f}" for name, value in asdict(self).items())


def measure(trajectories: Sequence[Trajectory], protocol: GateProtocol) -> Skill:
    """The skill that ``trajectories`` show, each turn judged against the memory it was shown."""
    turns = [pair for trajectory in trajectories for pair in _judged(trajectory, protocol)]
    parsed = [(want, gate) for want, gate in turns if gate is not None]
    verdicts = [(want, parse_verdict(gate.think) or (None, None)) for want, gate in parsed]
    all_turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return Skill(
        readings=len(trajectories),
        turns=len(turns),
        format_correct=_mean([turn.parsed for turn in all_turns]),
        verdict_new=_mean([want.new == said[0] for want, said in verdicts]),
        verdict_complete=_mean([want.complete == said[1] for want, said in verdicts]),
        candidate=_mean([want.candidate == gate.candidate for want, gate in parsed]),
        answer=_mean([_answer_of(one.task, one.turns[-1].memory) == one.answer for one in trajectories]),
        update_given_evidence=_mean([gate.update for want, gate in parsed if want.new]),
        update_given_none=_mean([gate.update for want, gate in parsed if not want.new]),
        end_at_target=_mean([gate.end for want, gate in parsed if want.at_target]),
        end_elsewhere=_mean([gate.end for want, gate in parsed if not want.at_target]),
        outcome=_mean([one.answer in (one.task.answers or ()) for one in trajectories]),
        exact_exit=_mean([one.exit_index == _target(one.task) for one in trajectories]),
        chunks_read=_mean([one.exit_index + 1 for one in trajectories]),
    )


@dataclass(frozen=True)
class _Wanted:
    new: bool
    complete: bool
    candidate: str
    at_target: bool


def _judged(trajectory: Trajectory, protocol: GateProtocol) -> list[tuple[_Wanted, GateTurn | None]]:
    memory, judged = FIRST_MEMORY, []
    for index, turn in enumerate(trajectory.chunk_turns):
        judged.append((_wanted(trajectory.task, index, memory, protocol), turn.gate))
        memory = turn.memory
    return judged


def _wanted(task: ReadingTask, index: int, memory: str, protocol: GateProtocol) -> _Wanted:
    note = log_note(task, index)
    candidate = merge_memory(memory, note, protocol)
    return _Wanted(bool(note), _answer_of(task, candidate) != UNKNOWN, candidate, index == task.exit.index)


def _answer_of(task: ReadingTask, memory: str) -> str:
    """The answer that ``memory`` gives to the question of ``task``."""
    facts = [fact.split() for fact in f" {memory}".split(" - ")]
    places = {(fact[0], fact[1]): fact[2] for fact in facts if len(fact) == 3}
    found = [places.get(pair, UNKNOWN) for pair in asked_pairs(task.question)]
    return UNKNOWN if UNKNOWN in found else " ".join(found)


def _target(task: ReadingTask) -> int:
    return task.last_index if task.exit.index is None else task.exit.index


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def oracle(task: ReadingTask) -> GateOverride:
    """Gates that obey the labels, whatever the model wrote."""
    return lambda index, turn: replace(turn, update=bool(task.evidence[index]), end=index == task.exit.index)


def sample_readings(
    network: Any,
    protocol: GateProtocol,
    tasks: Sequence[ReadingTask],
    pad_id: int,
    seed: int,
    override: Callable[[ReadingTask], GateOverride] | None = None,
    sampling: Sampling = SAMPLING,
) -> list[Trajectory]:
    """One reading of every task, their turns generated together."""
    import torch

    generator = torch.Generator(network.device).manual_seed(seed)
    return asyncio.run(_read_all(_Batch(network, pad_id, generator), protocol, tasks, override, sampling))


async def _read_all(
    batch: _Batch,
    protocol: GateProtocol,
    tasks: Sequence[ReadingTask],
    override: Callable[[ReadingTask], GateOverride] | None,
    sampling: Sampling,
) -> list[Trajectory]:
    readings = [
        asyncio.ensure_future(read(task, protocol, batch.generate, sampling, override(task) if override else None))
        for task in tasks
    ]
    while not all(reading.done() for reading in readings):
        await asyncio.sleep(0)
        batch.flush(sampling)
    return [reading.result() for reading in readings]


class _Batch:
    """Collects the prompts of all readings that wait, then generates for all of them at once."""

    def __init__(self, network: Any, pad_id: int, generator: torch.Generator) -> None:
        self._network, self._pad_id, self._generator = network, pad_id, generator
        self._waiting: list[tuple[Prompt, asyncio.Future[Generation]]] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:  # noqa: ARG002 - one for all
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, future))
        return await future

    def flush(self, sampling: Sampling) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        prompts = [prompt.ids for prompt, _ in waiting]
        responses = generate_batch(self._network, prompts, sampling, self._pad_id, self._generator)
        for (_, future), response in zip(waiting, responses, strict=True):
            future.set_result(response)


def generate_batch(
    network: Any,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    pad_id: int,
    generator: torch.Generator,
) -> list[Generation]:
    """One response a prompt at ``sampling.temperature`` (0 is greedy), without top-p, top-k and log-probs."""
    import torch

    width = max(map(len, prompts))
    padded = [(*[pad_id] * (width - len(prompt)), *prompt) for prompt in prompts]
    inputs = torch.tensor(padded, device=network.device)  # [B, T]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=network.device)
    rows: list[list[int]] = [[] for _ in prompts]
    stop, open_rows, cache = network.config.eos_token_id, set(range(len(prompts))), None
    with torch.no_grad():
        for _ in range(sampling.max_tokens):
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -inputs.shape[1] :]
            out = network(
                input_ids=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            inputs = _draw(out.logits[:, -1].float(), sampling.temperature, generator)[:, None]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            tokens = inputs[:, 0].tolist()
            for row in tuple(open_rows):
                rows[row].append(tokens[row])
                if tokens[row] == stop:
                    open_rows.discard(row)
            if not open_rows:
                break
    return [Generation(tuple(row), (0.0,) * len(row), index in open_rows) for index, row in enumerate(rows)]


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    import torch

    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)[:, 0]


def first_mistakes(trajectories: Sequence[Trajectory], protocol: GateProtocol, count: int) -> list[str]:
    """Turns that are wrong in verdict or candidate, prompt and response, to read."""
    codec, shown = protocol.codec, []
    for trajectory in trajectories:
        memory = FIRST_MEMORY
        for index, turn in enumerate(trajectory.chunk_turns):
            if _is_wrong(_wanted(trajectory.task, index, memory, protocol), turn):
                shown.append(codec.decode(turn.prompt.ids) + turn.text)
            memory = turn.memory
    return shown[:count]


def _is_wrong(want: _Wanted, turn: Turn) -> bool:
    if turn.gate is None:
        return True
    said = parse_verdict(turn.gate.think)
    return said != (want.new, want.complete) or turn.gate.candidate != want.candidate
