"""``manifest.json``: which files make a corpus, and where its labels come from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from poimen_exp.corpus.contract import Agreement, Chunking, LabelBlock, check_block, read_block
from poimen_exp.errors import CorpusError, Refused

SCHEMA = "poimen.manifest/1"
LabelStatus = Literal["constructed", "measured", "unmeasured"]
_WEAKEST: tuple[LabelStatus, ...] = ("unmeasured", "measured", "constructed")


@dataclass(frozen=True)
class ManifestFile:
    """One ``.jsonl`` or ``.jsonl.gz``; ``path`` is relative to the manifest's folder, with forward slashes."""

    path: str
    sha256: str
    records: int


@dataclass(frozen=True)
class Manifest:
    """A manifest whose labels passed the contract (or were let through unmeasured)."""

    path: Path
    sha256: str
    corpus_id: str
    files: tuple[ManifestFile, ...]
    update: LabelBlock
    exit: LabelBlock
    licenses: tuple[str, ...]
    dropped: Mapping[str, int]
    label_status: LabelStatus
    unmeasured: tuple[str, ...]
    """Why labels count as unmeasured: the refusals that ``allow_unmeasured`` let pass."""

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def agreements(self) -> Mapping[str, Agreement]:
        """The measured agreement blocks by gate: "update", "exit"."""
        blocks = {"update": self.update, "exit": self.exit}
        return {gate: block.agreement for gate, block in blocks.items() if block.agreement is not None}


class ManifestText:
    """A manifest's text, able to say on which line a key stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.raw = path.read_bytes()
        except FileNotFoundError:
            raise CorpusError(
                f"{path}: not found; a corpus is a folder with a manifest.json and *.jsonl files (docs/corpora.md)"
            ) from None
        except NotADirectoryError:
            raise CorpusError(
                f"{path.parent}:1: got a file, expected a folder with a manifest.json and *.jsonl files "
                "(docs/corpora.md); poimen corpus convert --from jsonl makes one of it"
            ) from None
        except OSError as error:
            raise CorpusError(f"{path}:1: {error.strerror}") from None
        self.text = self.raw.decode("utf-8-sig", errors="replace")
        if "\ufffd" in self.text:
            raise CorpusError(f"{path}:1: not UTF-8; write the manifest as UTF-8")

    def parse(self) -> dict[str, Any]:
        try:
            value = json.loads(self.text, object_pairs_hook=self._unique)
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text
        except json.JSONDecodeError as error:
            raise CorpusError(f"{self.path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from None
        except (RecursionError, ValueError) as error:
            raise CorpusError(f"{self.path}:1: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise CorpusError(f"{self.path}:1: got {type(value).__name__}, expected an object")
        return value

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise self.error((twice,), f"key {twice!r} occurs twice in one object; keep one")
        return value

    def error(self, keys: tuple[str, ...], message: str) -> CorpusError:
        """A refusal at the line of the innermost of ``keys`` that is there."""
        position = 0
        for key in keys:
            found = self.text.find(json.dumps(key), position)
            if found < 0:
                break
            position = found
        return CorpusError(f"{self.path}:{self.text.count(chr(10), 0, position) + 1}: {message}")


def load_manifest(
    path: str | Path,
    *,
    min_kappa: float = 0.6,
    allow_unmeasured: bool = False,
    chunking: Chunking | None = None,
) -> Manifest:
    """Reads a manifest (or the one of a corpus folder) and holds its labels against the kappa contract; reads no row.

    Args:
        min_kappa: least Cohen's kappa of labels by labelers.
        allow_unmeasured: lets labels without a valid agreement pass; the status is then "unmeasured".
        chunking: how this run cuts documents; a kappa measured on another chunking is refused. None does not ask.

    Raises:
        CorpusError: with the reason, at the manifest's line.
    """
    text = ManifestText(_manifest_file(Path(path)))
    value = text.parse()
    if value.get("schema") != SCHEMA:
        raise text.error(("schema",), f"schema: got {value.get('schema')!r}, expected {SCHEMA!r}")
    corpus_id = value.get("corpus_id")
    if not isinstance(corpus_id, str) or not corpus_id:
        raise text.error(("corpus_id",), f"corpus_id: got {corpus_id!r}, expected a name")
    files, dropped = _files(text, value.get("files")), _dropped(text, value.get("dropped", {}))
    licenses = value.get("licenses", [])
    if not isinstance(licenses, list) or not all(isinstance(item, str) for item in licenses):
        raise text.error(("licenses",), f"licenses: got {licenses!r}, expected a list of strings")
    blocks, status, reasons = _labels(text, value.get("labels"), min_kappa, allow_unmeasured, chunking)
    return Manifest(
        path=text.path,
        sha256=hashlib.sha256(text.raw).hexdigest(),
        corpus_id=corpus_id,
        files=files,
        update=blocks["update"],
        exit=blocks["exit"],
        licenses=tuple(licenses),
        dropped=dropped,
        label_status=status,
        unmeasured=reasons,
    )


def require_corpus(path: Path) -> None:
    """Refuses a ``corpus.path`` that holds no manifest; nothing is read, so that it can come first."""
    if not _manifest_file(path).is_file():
        raise Refused(
            f"corpus.path={path}: no manifest.json there; expected a folder with a manifest.json and *.jsonl files "
            "(docs/corpora.md; +experiment=quickstart ships one)"
        )


def _manifest_file(path: Path) -> Path:
    return path / "manifest.json" if path.is_dir() or path.suffix != ".json" else path


def _files(text: ManifestText, value: object) -> tuple[ManifestFile, ...]:
    if not isinstance(value, list) or not value:
        raise text.error(("files",), f"files: got {value!r}, expected a list of at least one file")
    files: list[ManifestFile] = []
    for position, item in enumerate(value):
        where = f"files[{position}]"
        if not isinstance(item, dict):
            raise text.error(("files",), f"{where}: got {item!r}, expected an object with path, sha256 and records")
        path, sha256, records = item.get("path"), item.get("sha256"), item.get("records")
        if not isinstance(path, str) or not path.endswith((".jsonl", ".jsonl.gz")) or not _inside(path):
            raise text.error(
                ("files",), f"{where}.path: got {path!r}, expected a .jsonl or .jsonl.gz inside the corpus folder"
            )
        if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise text.error(("files", path), f"{where}.sha256: got {sha256!r}, expected 64 lower-case hex digits")
        if not isinstance(records, int) or isinstance(records, bool) or records < 0:
            raise text.error(("files", path), f"{where}.records: got {records!r}, expected the number of its rows")
        if any(path == other.path for other in files):
            raise text.error(("files", path), f"{where}.path: {path!r} is listed twice")
        files.append(ManifestFile(path, sha256, records))
    return tuple(files)


def _inside(path: str) -> bool:
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and "\\" not in path and "\0" not in path


def _dropped(text: ManifestText, value: object) -> dict[str, int]:
    good = isinstance(value, dict) and all(isinstance(n, int) and not isinstance(n, bool) for n in value.values())
    if not good:
        raise text.error(("dropped",), f"dropped: got {value!r}, expected an object of reason: number of rows")
    assert isinstance(value, dict)
    return dict(value)


def _labels(
    text: ManifestText, value: object, min_kappa: float, allow_unmeasured: bool, chunking: Chunking | None
) -> tuple[dict[str, LabelBlock], LabelStatus, tuple[str, ...]]:
    blocks: dict[str, LabelBlock] = {}
    statuses: list[LabelStatus] = []
    reasons: list[str] = []
    for gate in ("update", "exit"):
        block, problem = read_block(gate, value)
        if problem is None:
            problem = check_block(gate, block, min_kappa, chunking)
        if problem is not None and not allow_unmeasured:
            raise text.error(("labels", gate, *problem.keys), problem.message)
        if problem is not None:
            reasons.append(problem.message)
        blocks[gate] = block
        measured: LabelStatus = "constructed" if block.origin == "constructed" else "measured"
        statuses.append("unmeasured" if problem is not None else measured)
    return blocks, min(statuses, key=_WEAKEST.index), tuple(reasons)
