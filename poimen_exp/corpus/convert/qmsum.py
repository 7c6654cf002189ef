"""QMSum: queries about meetings; evidence is ranges of turns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from poimen_exp.corpus.convert import Conversion, Record, read_json, wanted
from poimen_exp.errors import CorpusError

LICENSES = ("QMSum: MIT", "transcripts: AMI and ICSI corpora (CC BY 4.0), Welsh and Canadian parliaments")
_SCENARIO = re.compile(r"((?:ES|IS|TS)\d{4})[a-z]?")
_SERIES = re.compile(r"([A-Za-z]+)_?\d+[a-z]?")


def convert(path: Path) -> Conversion:
    """One document a meeting, one project a meeting series; turns are units.

    Queries about a whole meeting name no range and are dropped. ``path`` is one meeting's JSON file or a folder,
    searched through all levels.
    """
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not files:
        raise CorpusError(f"{path}:1: no *.json below this folder")
    dropped: Counter[str] = Counter()
    return Conversion("qmsum", _records(files, dropped), LICENSES, dropped, {"source": path.name})


def series(meeting: str) -> str:
    """The series a meeting belongs to: ES2004a to ES2004d are one team, Bmr005 and Bmr012 one group.

    A name of another form is its own series.
    """
    match = _SCENARIO.fullmatch(meeting) or _SERIES.fullmatch(meeting)
    return match[1] if match else meeting


def _records(files: Sequence[Path], dropped: Counter[str]) -> Iterator[Record]:
    for path in files:
        meeting, where, value = path.stem, f"{path}:1", read_json(path)
        turns = [_turn(where, item) for item in wanted(where, value, "meeting_transcripts", list)]
        units = [{"unit_id": f"t{number}", "text": text} for number, text in enumerate(turns) if text]
        yield {"type": "document", "document_id": meeting, "project": series(meeting), "units": units}
        dropped["whole_meeting_query"] += len(value.get("general_query_list") or [])
        seen: set[str] = set()
        for number, item in enumerate(wanted(where, value, "specific_query_list", list)):
            query = wanted(where, item, "query", str).strip()
            evidence = _evidence(turns, wanted(where, item, "relevant_text_span", list))
            if query.casefold() in seen:
                dropped["duplicate_query"] += 1
            elif not evidence:
                dropped["range_not_in_meeting"] += 1
            else:
                yield {
                    "type": "trajectory",
                    "trajectory_id": f"{meeting}-q{number}",
                    "document_id": meeting,
                    "question": query,
                    "answers": [wanted(where, item, "answer", str)],
                    "evidence": evidence,
                }
            seen.add(query.casefold())


def _turn(where: str, item: object) -> str:
    """``Speaker: text``, or "" for a turn without text."""
    content = wanted(where, item, "content", str).strip()
    return f"{wanted(where, item, 'speaker', str).strip()}: {content}" if content else ""


def _evidence(turns: Sequence[str], ranges: list[Any]) -> list[dict[str, Any]]:
    """Spans of the turns in the inclusive ``ranges``; [] if a range lies outside the meeting or holds no text."""
    chosen: dict[int, None] = {}
    for item in ranges:
        if not isinstance(item, list) or len(item) != 2 or not all(str(end).isdecimal() for end in item):
            return []
        first, last = int(item[0]), int(item[1])
        if not first <= last < len(turns):
            return []
        chosen |= dict.fromkeys(range(first, last + 1))
    return [
        {"unit_id": f"t{number}", "start": 0, "end": len(turns[number])} for number in sorted(chosen) if turns[number]
    ]
