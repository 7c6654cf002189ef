"""Reads and validates a large corpus: MB/s on one core, and peak resident memory. Chunking is reported apart.

    python benchmarks/corpus_load.py [--gb 2] [--form documents|chunks] [--keep DIR] [--check]

Writes a corpus of that size into a temporary folder (or DIR, where it is used again), then loads it in a process of
its own. CPU seconds are of that process, so that a busy machine does not count. With ``--check`` it runs ``poimen
corpus check`` too: once with an empty cache of cuts, and once more with a full one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poimen_exp.corpus import write_corpus

TEXT = (
    "the meeting moved to Friday and nobody objected because our release was late again so we wrote it down in "
    'café notes "as agreed" before lunch; build 42 failed'
)
WORDS = TEXT.split()


def records(size: int, form: str) -> Iterator[dict[str, Any]]:
    """Documents of about 100 kB with eight trajectories each, or trajectories with chunks of about 20 kB."""
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=60)) for _ in range(5000)]
    written, number = 0, 0
    while written < size:
        number += 1
        made = list(_documents(number, lines, rng) if form == "documents" else _own_chunks(number, lines, rng))
        written += sum(len(json.dumps(record, ensure_ascii=False)) for record in made)
        yield from made


def _documents(number: int, lines: list[str], rng: random.Random) -> Iterator[dict[str, Any]]:
    units = [
        {"unit_id": f"u{k}", "text": f"{number}.{k} {rng.choice(lines)}", "header": f"[day {k // 20}]"}
        for k in range(280)
    ]
    yield {"type": "document", "document_id": f"d{number}", "project": f"p{number % 50}", "units": units}
    for k in range(8):
        yield {
            "type": "trajectory", "trajectory_id": f"t{number}-{k}", "document_id": f"d{number}",
            "question": "What was agreed?", "answers": ["Friday"],
            "evidence": [{"unit_id": f"u{rng.randrange(280)}", "start": 0, "end": 40}],
        }  # fmt: skip


def _own_chunks(number: int, lines: list[str], rng: random.Random) -> Iterator[dict[str, Any]]:
    chunks = [
        {"text": f"{number}.{k} " + "\n".join(rng.choices(lines, k=60)), "evidence": rng.random() < 0.1}
        for k in range(10)
    ]
    yield {
        "type": "trajectory", "trajectory_id": f"t{number}", "project": f"p{number % 50}",
        "question": "What was agreed?", "answers": None, "chunks": chunks,
    }  # fmt: skip


def load(folder: Path) -> dict[str, float]:
    """Figures of one load: the manifest, every row, the split and its overlap."""
    from poimen_exp.corpus.index import scan
    from poimen_exp.corpus.lines import refuse
    from poimen_exp.corpus.manifest import load_manifest
    from poimen_exp.corpus.overlap import check_overlap
    from poimen_exp.corpus.split import split_projects

    size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
    wall, cpu = time.perf_counter(), time.process_time()
    index = scan(load_manifest(folder), refuse)
    check_overlap(index, split_projects(index.projects, 0, 0.15, 0.15), refuse)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "size_MB": round(size / 1e6),
        "rows": len(index.tasks) + len(index.documents),
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "MB_per_cpu_s": round(size / 1e6 / cpu, 1),
        "MB_per_wall_s": round(size / 1e6 / wall, 1),
        "peak_rss_MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def chunk_sample(folder: Path, tokenizer: str, documents: int = 20) -> dict[str, float]:
    """Seconds and tokens of cutting the first documents to 5,000 tokens, without the cache."""
    from poimen_exp.corpus.chunking import UnitCounts, plan_chunks
    from poimen_exp.corpus.counting import load_counter
    from poimen_exp.corpus.rows import DocumentRow, decode_row

    counts, seconds, tokens, done = UnitCounts(load_counter(tokenizer)), 0.0, 0, 0
    with (folder / "corpus.jsonl").open("rb") as stream:
        for line in stream:
            row = decode_row(line)
            if isinstance(row, DocumentRow) and done < documents:
                started = time.process_time()
                tokens += sum(plan_chunks(row.units, 5000, counts).counts)
                seconds += time.process_time() - started
                done += 1
            if done == documents:
                break
    return {"documents": done, "tokens": tokens, "tokens_per_cpu_s": round(tokens / seconds) if seconds else 0}


def check(folder: Path, tokenizer: str, chunk_tokens: int, cache: Path) -> dict[str, float]:
    """Figures of one ``poimen corpus check`` in a process of its own; it may find anything but a problem."""
    arguments = ["corpus", "check", str(folder), "--tokenizer", tokenizer, "--chunk-tokens", str(chunk_tokens)]
    program = "from poimen_exp.cli import main; main()"
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=os.environ | {"POIMEN_CACHE": str(cache)}, stdout=sys.stderr
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"poimen corpus check: exit code {process.returncode}")
    return {
        "size_MB": round(sum(path.stat().st_size for path in folder.glob("*.jsonl")) / 1e6),
        "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_MB": round(usage.ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--form", choices=["documents", "chunks"], default="documents")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--tokenizer", default="words")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--chunk-tokens", type=int, default=5000, help="for --check")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(load(options.load)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if not (folder / "manifest.json").exists():
            write_corpus(folder, records(int(options.gb * 1e9), options.form), corpus_id="benchmark")
        done = subprocess.run(
            [sys.executable, __file__, "--load", str(folder)], check=True, capture_output=True, text=True
        )
        print(f"load ({options.form}):", done.stdout.strip())
        if options.form == "documents":
            print("chunking (apart, first 20 documents):", json.dumps(chunk_sample(folder, options.tokenizer)))
        if options.check:
            cache = Path(temporary) / "cache"
            for name in ("an empty cache", "the cuts in the cache"):
                figures = check(folder, options.tokenizer, options.chunk_tokens, cache)
                print(f"check ({options.form}, {name}):", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
