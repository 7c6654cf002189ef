"""Physical lines of a file: split at LF and nowhere else, in bounded memory, with the file's SHA-256 on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from poimen_exp.corpus.rows import MAX_LINE_BYTES
from poimen_exp.errors import CorpusError

Report = Callable[[str, int, str], None]
"""Takes (file, physical line, message) of a problem; the loader's raises, the checker's collects."""

_BOM = b"\xef\xbb\xbf"
_BUFFER = 2**20


def refuse(file: str, line: int, message: str) -> None:
    """A ``Report`` that ends at the first problem."""
    raise CorpusError(f"{file}:{line}: {message}")


class LineReader:
    """Iterates over ``(line number, byte offset, bytes without LF)`` of the lines that are not blank.

    A byte order mark at the start of the file is skipped. CR before LF stays: JSON reads it as white space. U+2028,
    U+0085 and their like are text. A line over ``MAX_LINE_BYTES`` is reported and skipped.

    Attributes:
        sha256: of the bytes read so far; of the whole file once the iteration ended.
        lines: physical lines read so far.
    """

    def __init__(self, path: Path, name: str, report: Report) -> None:
        self._path, self._name, self._report = path, name, report
        self._digest = hashlib.sha256()
        self.lines = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        with self._path.open("rb", buffering=_BUFFER) as stream:
            offset = 0
            while raw := stream.readline(MAX_LINE_BYTES + 1):
                self._digest.update(raw)
                self.lines += 1
                start, offset = offset, offset + len(raw)
                if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    offset += self._skip_rest(stream)
                    self._report(self._name, self.lines, f"the line has over {MAX_LINE_BYTES:,} bytes; split it")
                    continue
                if start == 0 and raw.startswith(_BOM):
                    start, raw = len(_BOM), raw[len(_BOM) :]
                raw = raw.removesuffix(b"\n")
                if raw and not raw.isspace():
                    yield self.lines, start, raw

    def _skip_rest(self, stream: BinaryIO) -> int:
        skipped = 0
        while raw := stream.readline(2**20):
            self._digest.update(raw)
            skipped += len(raw)
            if raw.endswith(b"\n"):
                break
        return skipped
