"""The gate check on the run's own corpus: a reader that knows the labels against readers that get everything wrong.

Each sampled task is read three times through the real loop, parser, scorer and advantages, with stand-ins for the chunk
texts (nobody looks at them): the *oracle* (labelled gates, exit at the target, right answer), its *inverse* (every gate
opposite, exit one chunk off, wrong answer) and the *garbled* reader (no response parses).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from poimen_exp.gates import metrics, scoring
from poimen_exp.gates.check_report import Recorder
from poimen_exp.gates.check_script import answer_text, byte_protocol, play, turn_text
from poimen_exp.gates.outcome import Matcher
from poimen_exp.gates.protocol import GateProtocol
from poimen_exp.gates.rewards import OnUnparsed, TrajectoryScore
from poimen_exp.gates.scoring import ScoredTrajectory, TurnBaseline
from poimen_exp.gates.types import ReadingTask

_MAX_CHUNKS = 2000
"""Chunks read by each reader: keeps the check within its seconds on a corpus of long documents."""
_EARLY, _LATE = -0.75, -0.5


@dataclass(frozen=True)
class CorpusRules:
    """What of a run's settings decides how its corpus is scored."""

    alpha: float
    turn_baseline: TurnBaseline
    on_unparsed: OnUnparsed
    matcher: Matcher


@dataclass(frozen=True)
class _Readings:
    """One task with its readings, and what was written for the inverse to deserve.

    ``inverse_exit`` is the exit reward the inverse must get; None where every exit is right or none is known.
    ``wrong_answer`` False: any answer is right under the matcher, so that the outcome tells nobody apart.
    """

    task: ReadingTask
    oracle: ScoredTrajectory
    inverse: ScoredTrajectory
    garbled: ScoredTrajectory
    inverse_exit: float | None
    wrong_answer: bool


def check_corpus(tasks: Sequence[ReadingTask], rules: CorpusRules, sample: int, out: Recorder) -> None:
    """Oracle against inverse on up to ``sample`` tasks spread over ``tasks``."""
    with out.section("corpus"):
        drawn = _sample(tasks, sample)
        protocol = byte_protocol()
        readings = [_read(task, protocol, place, rules) for place, task in enumerate(drawn)]
        out.above("tasks that an oracle can read", len(readings), 0)
        if readings:
            _check_targets(out, drawn)
            _check_update(out, readings)
            _check_exit(out, readings)
            _check_format(out, readings)
            _check_outcome(out, readings)
            _check_maximum(out, readings)
            _check_advantages(out, readings, rules)


def _sample(tasks: Sequence[ReadingTask], sample: int) -> list[ReadingTask]:
    """Tasks spread evenly over the split whose answer can be written into a box, within the chunk budget."""
    count = min(sample, len(tasks))
    drawn: list[ReadingTask] = []
    chunks = 0
    for place in range(count):
        task = tasks[place * len(tasks) // count]
        if task.answers is not None and _writable(task.answers) is None:
            continue
        chunks += len(task.chunks)
        if drawn and chunks > _MAX_CHUNKS:
            break
        drawn.append(task)
    return drawn


def _writable(answers: Sequence[str]) -> str | None:
    """The first accepted answer that a box can hold: balanced braces, no box inside."""
    for answer in answers:
        depth, lowest = 0, 0
        for character in answer:
            depth += {"{": 1, "}": -1}.get(character, 0)
            lowest = min(lowest, depth)
        if depth == lowest == 0 and "\\boxed" not in answer:
            return answer
    return None


def _read(task: ReadingTask, protocol: GateProtocol, place: int, rules: CorpusRules) -> _Readings:
    from poimen_exp.evaluation import readers

    short = dataclasses.replace(task, question="q", chunks=tuple("c" for _ in task.chunks))
    target = task.exit.index if task.exit.known else None  # None: an oracle reads everything
    right = "anything" if task.answers is None else str(_writable(task.answers))
    wrong, stop, exit_part = _wrong_answer(task.answers or ()), _wrong_exit(task, place), None
    if stop is not None:
        exit_part = _EARLY if stop < (task.last_index if target is None else target) else _LATE
    flipped = [label is None or not label for label in task.evidence]
    count = len(flipped) if target is None else target + 1
    scored = []
    for sample, (script, override) in enumerate(
        (
            ([*_turns(flipped[:count], None), answer_text(right)], readers.oracle(task)),  # corrects what is written
            ([*_turns(flipped, stop), answer_text(wrong or "")], None),
            (["<check>yes</check>"] * len(flipped) + ["no box"], None),
        )
    ):
        trajectory = play(short, protocol, script, override)
        score = scoring.score(trajectory, rules.matcher, rules.on_unparsed)
        scored.append(ScoredTrajectory(trajectory, score, place, sample))
    return _Readings(task, scored[0], scored[1], scored[2], exit_part, wrong is not None)


def _turns(gates: Sequence[bool], stop: int | None) -> list[str]:
    """Responses up to the chunk that says ``end``; to the last chunk, without an ``end``, if ``stop`` is None."""
    read = gates if stop is None else gates[: stop + 1]
    return [turn_text(update, end=place == stop, memory=f"m{place}") for place, update in enumerate(read)]


def _wrong_exit(task: ReadingTask, place: int) -> int | None:
    """A chunk next to the target: before it in tasks of even place, after it in the others, where there is one."""
    if not task.exit.known:
        return None
    last = len(task.chunks) - 1
    target = last if task.exit.index is None else task.exit.index
    beside = [stop for stop in (target - 1, target + 1) if 0 <= stop <= last]
    return beside[place % len(beside)] if beside else None


def _wrong_answer(answers: Sequence[str]) -> str | None:
    """A word that no accepted answer has; None where an accepted answer is empty of words, which anything contains."""
    words = [set("".join(c if c.isalnum() else " " for c in answer.lower()).split()) for answer in answers]
    if any(not found - {"a", "an", "the"} for found in words):
        return None
    number = 0
    while any(f"zq{number}" in found for found in words):
        number += 1
    return f"zq{number}"


def _check_targets(out: Recorder, tasks: Sequence[ReadingTask]) -> None:
    early = []
    for task in tasks:
        evidence = [index for index, label in enumerate(task.evidence) if label]
        wanted = task.last_index if task.exit.index is None else task.exit.index
        if task.exit.known and evidence and wanted < evidence[-1]:
            early.append(task)
    _none(out, "exit: targets before the last evidence", early)


def _check_update(out: Recorder, readings: Sequence[_Readings]) -> None:
    labelled = sum(label is not None for item in readings for label in item.task.evidence)
    out.above("update: labelled chunks, without which no gate can be told from its opposite", labelled, 0)
    for name, expected in (("oracle", 1.0), ("inverse", -1.0), ("garbled", -1.0)):
        of_task = [
            (item.task, [value for value in _score(item, name).update if value is not None]) for item in readings
        ]
        values = [value for _, found in of_task for value in found]
        if values:
            off = [task for task, found in of_task if any(value != expected for value in found)]
            mean = sum(values) / len(values)
            out.equal(f"update: mean reward of the {name} reader", mean, expected, where=_first(off))


def _check_exit(out: Recorder, readings: Sequence[_Readings]) -> None:
    known = [item for item in readings if item.inverse_exit is not None]
    out.above("exit: tasks of several chunks with a known target, without which every exit is right", len(known), 0)
    wrong = [item.task for item in readings if item.oracle.score.exit != 0]
    _none(out, "exit: oracle readings whose reward is not 0", wrong)
    wrong = [item.task for item in known if item.inverse.score.exit != item.inverse_exit]
    _none(out, "exit: inverse readings whose reward is not -0.75 one chunk early, -0.5 one late", wrong)


def _check_format(out: Recorder, readings: Sequence[_Readings]) -> None:
    for name, expected in (("oracle", 1.0), ("inverse", 1.0), ("garbled", 0.0)):
        values = [_score(item, name).format for item in readings]
        out.equal(f"format: mean reward of the {name} reader", sum(values) / len(values), expected)


def _check_outcome(out: Recorder, readings: Sequence[_Readings]) -> None:
    answered = [item for item in readings if item.task.answers is not None]
    distinct = [item for item in answered if item.wrong_answer]
    for name, pool, expected in (("oracle", answered, 1.0), ("inverse", distinct, 0.0), ("garbled", answered, 0.0)):
        if pool:
            values = [_score(item, name).outcome for item in pool]
            off = [item.task for item, value in zip(pool, values, strict=True) if value != expected]
            mean = sum(values) / len(values)
            out.equal(f"outcome: mean reward of the {name} reader", mean, expected, where=_first(off))


def _check_maximum(out: Recorder, readings: Sequence[_Readings]) -> None:
    """The oracle's total is 2 with answers and 1 without, task for task and in the metrics that runs are judged by."""
    best = [1.0 if item.task.answers is None else 2.0 for item in readings]
    off = [item.task for item, top in zip(readings, best, strict=True) if item.oracle.score.total != top]
    _none(out, "total: oracle readings that miss the maximum (2 with answers, 1 without)", off)
    means = metrics.gate_metrics([item.oracle for item in readings]).means()
    out.equal("total: reward/total of the oracle reader", means.get("reward/total"), sum(best) / len(best))
    for name in ("update_accuracy/evidence_present", "update_accuracy/evidence_free", "exit/exact", "format_correct"):
        if f"gates/{name}" in means:
            out.equal(f"metric gates/{name} of the oracle reader", means[f"gates/{name}"], 1.0)


def _check_advantages(out: Recorder, readings: Sequence[_Readings], rules: CorpusRules) -> None:
    """Oracle less inverse, row by row: the baseline they share cancels, whichever it is.

    The trajectory term must differ by the difference of the totals, and the turn term by 2 where both read a labelled
    chunk.
    """
    batch = [scored for item in readings for scored in (item.oracle, item.inverse)]
    rows, found = scoring.advantages_of(batch, rules.alpha, rules.turn_baseline)
    owner, step, mixed = rows.trajectory.tolist(), rows.step.tolist(), found.mixed.tolist()
    place = {(owner[row], step[row]): row for row in range(len(owner))}
    worst, where = 0.0, ""
    for number, item in enumerate(readings):
        shared = min(len(item.oracle.trajectory.chunk_turns), len(item.inverse.trajectory.chunk_turns))
        gap = item.oracle.score.total - item.inverse.score.total
        for chunk, label in enumerate(item.task.evidence[:shared]):
            expected = rules.alpha * gap + (1 - rules.alpha) * (0.0 if label is None else 2.0)
            got = mixed[place[2 * number, chunk]] - mixed[place[2 * number + 1, chunk]]
            if abs(got - expected) > worst:
                worst = abs(got - expected)
                where = f"{_place(item.task)}, chunk {chunk}: got {got:g}, expected {expected:g}"
    out.equal(
        f"advantage of oracle over inverse at alpha {rules.alpha:g}, {rules.turn_baseline}: largest error",
        worst,
        0.0,
        tolerance=1e-5,
        where=where if worst > 1e-5 else "",
    )


def _score(item: _Readings, name: str) -> TrajectoryScore:
    scored: ScoredTrajectory = {"oracle": item.oracle, "inverse": item.inverse, "garbled": item.garbled}[name]
    return scored.score


def _place(task: ReadingTask) -> str:
    return f"{task.source}: {task.task_id}" if task.source else f"task {task.task_id}"


def _none(out: Recorder, name: str, tasks: Sequence[ReadingTask]) -> None:
    """A number of offending tasks that must be 0; the first is named."""
    out.equal(name, len(tasks), 0, where=_first(tasks))


def _first(tasks: Sequence[ReadingTask]) -> str:
    return _place(tasks[0]) if tasks else ""
