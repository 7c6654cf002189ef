"""LoCoMo: conversations over many sessions; evidence is whole turns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from poimen_exp.corpus.convert import Conversion, Record, read_json, wanted
from poimen_exp.errors import CorpusError

LICENSES = ("LoCoMo: CC BY-NC 4.0 (non-commercial)",)
ADVERSARIAL = 5
_TURN_ID = re.compile(r"D:?(\d+):(\d+)")
_SEPARATORS = re.compile(r"[\s,;]*")


def convert(path: Path) -> Conversion:
    """One document and one project a conversation; turns are units, each under the header of its dated session.

    Adversarial questions are unanswerable: what the set lists as their evidence is the trap, not evidence. An image
    stands in the text by its caption; the search query it was found with is left out, since answers leak from it.
    """
    conversations = read_json(path)
    if not isinstance(conversations, list):
        raise CorpusError(f"{path}:1: got {type(conversations).__name__}, expected a list of conversations")
    dropped: Counter[str] = Counter()
    return Conversion("locomo", _records(path, conversations, dropped), LICENSES, dropped, {"source": path.name})


def _records(path: Path, conversations: list[Any], dropped: Counter[str]) -> Iterator[Record]:
    for position, item in enumerate(conversations):
        where = f"{path}:1: [{position}]"
        name = wanted(where, item, "sample_id", str)
        units = list(_units(where, wanted(where, item, "conversation", dict)))
        yield {"type": "document", "document_id": name, "project": name, "units": units}
        lengths = {unit["unit_id"]: len(unit["text"]) for unit in units}
        yield from _questions(where, name, wanted(where, item, "qa", list), lengths, dropped)


def _units(where: str, conversation: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    numbers = sorted(int(key[8:]) for key in conversation if re.fullmatch(r"session_\d+", key))
    for number in numbers:
        date = wanted(where, conversation, f"session_{number}_date_time", str)
        for turn in wanted(where, conversation, f"session_{number}", list):
            session, position = _turn_key(wanted(where, turn, "dia_id", str)) or (0, 0)
            text = f"{wanted(where, turn, 'speaker', str)}: {str(turn.get('text') or '').strip()}"
            caption = turn.get("blip_caption")
            if caption:
                text += f" [image: {str(caption).strip()}]"
            yield {"unit_id": f"D{session}:{position}", "text": text.strip(), "header": f"[Session {number}, {date}]"}


def _turn_key(text: str) -> tuple[int, int] | None:
    match = _TURN_ID.fullmatch(text.strip())
    return None if match is None else (int(match[1]), int(match[2]))


def turn_ids(entries: list[Any]) -> list[str] | None:
    """Turn ids of an evidence list, in order, each once; None if an entry holds something else.

    Repairs entries that join several ids, a stray colon (``D:11:26``) and leading zeros (``D30:05``).
    """
    found: dict[str, None] = {}
    for entry in entries:
        if not isinstance(entry, str) or not _TURN_ID.search(entry):
            return None
        if not _SEPARATORS.fullmatch(_TURN_ID.sub("", entry)):
            return None
        found |= {f"D{int(session)}:{int(turn)}": None for session, turn in _TURN_ID.findall(entry)}
    return list(found)


def _questions(
    where: str, name: str, rows: list[Any], lengths: Mapping[str, int], dropped: Counter[str]
) -> Iterator[Record]:
    """Trajectories of one conversation. Of questions with equal text the answerable one, else the first, is kept."""
    chosen: dict[str, tuple[int, Any]] = {}
    for number, row in enumerate(rows):
        key = " ".join(wanted(f"{where}.qa[{number}]", row, "question", str).casefold().split())
        category = wanted(f"{where}.qa[{number}]", row, "category", int)
        if key in chosen:
            dropped["duplicate_question"] += 1
        if key not in chosen or (chosen[key][1]["category"] == ADVERSARIAL and category != ADVERSARIAL):
            chosen[key] = (number, row)
    for number, row in sorted(chosen.values(), key=lambda item: item[0]):
        evidence = _evidence(f"{where}.qa[{number}]", row, lengths, dropped)
        if evidence is not None:
            answer = row.get("answer")
            yield {
                "type": "trajectory",
                "trajectory_id": f"{name}-q{number}",
                "document_id": name,
                "question": row["question"].strip(),
                "answers": None if answer is None else [str(answer)],
                "evidence": evidence,
                "category": row["category"],
            }


def _evidence(where: str, row: Any, lengths: Mapping[str, int], dropped: Counter[str]) -> list[dict[str, Any]] | None:
    """Spans of whole turns, [] for adversarial questions; None if the question is dropped (and counted)."""
    if row["category"] == ADVERSARIAL:
        return []
    entries = wanted(where, row, "evidence", list)
    ids = turn_ids(entries)
    if not entries:
        dropped["answerable_without_evidence"] += 1
    elif ids is None:
        dropped["evidence_id_malformed"] += 1
    elif any(one not in lengths for one in ids):
        dropped["evidence_id_not_in_conversation"] += 1
    else:
        return [{"unit_id": one, "start": 0, "end": lengths[one]} for one in ids]
    return None
