"""Public sets, and people's own exports, to ``poimen.corpus/1``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poimen_exp.corpus.lines import LineReader, refuse
from poimen_exp.corpus.writer import write_corpus
from poimen_exp.errors import CorpusError

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Conversion:
    """Records of a corpus, and what its manifest says about them.

    Attributes:
        dropped: reason: number of input rows left out; complete once ``records`` is exhausted.
    """

    corpus_id: str
    records: Iterable[Record]
    licenses: tuple[str, ...]
    dropped: Counter[str] = field(default_factory=Counter)
    extra: Mapping[str, Any] = field(default_factory=dict)


def write_conversion(conversion: Conversion, folder: Path, overwrite: bool = False, **manifest: Any) -> Path:
    """Writes a conversion as a corpus folder; gives the manifest's path."""
    return write_corpus(
        folder,
        conversion.records,
        corpus_id=conversion.corpus_id,
        licenses=conversion.licenses,
        dropped=conversion.dropped,
        overwrite=overwrite,
        extra=conversion.extra,
        **manifest,
    )


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """``(file:line, value)`` of a file of JSON values, one a line.

    Raises:
        CorpusError: with file and physical line.
    """
    import msgspec

    if not path.is_file():
        raise CorpusError(f"{path}:1: not found, or not a file")
    for number, _, raw in LineReader(path, str(path), refuse):
        try:
            yield f"{path}:{number}", msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise CorpusError(f"{path}:{number}: not one JSON value in UTF-8: {error}") from None


def read_json(path: Path) -> Any:
    """The one JSON value of a file.

    Raises:
        CorpusError: with file and physical line 1.
    """
    import msgspec

    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CorpusError(f"{path}:1: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorpusError(f"{path}:1: not JSON in UTF-8: {error}") from None


def wanted(where: str, record: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    """``record[key]`` if it is of ``kind``.

    Raises:
        CorpusError: at ``where``, naming the key, what was found and what was expected.
    """
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise CorpusError(f"{where}: {key}: got {value!r:.80}, expected {names}")
    return value


TokenCount = Callable[[str], float]


def words_x_1_3(text: str) -> float:
    """Tokens of English prose, estimated as words times 1.3 (code has twice as many: count those with a tokenizer)."""
    return 1.3 * len(text.split())
