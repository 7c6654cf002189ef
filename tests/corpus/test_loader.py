"""From a folder to reading tasks."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from poimen_exp.corpus import cache as cache_module
from poimen_exp.corpus import loader
from poimen_exp.errors import CorpusError, Refused
from poimen_exp.gates.types import ExitTarget, ReadingTask

from .support import document, labelled, open_at, question, three_projects, write, write_raw


def all_tasks(folder: Path, max_prompt_length: int = 1000, **changes: Any) -> dict[str, ReadingTask]:
    corpus = open_at(folder, max_prompt_length, **changes)
    return {task.task_id: task for side in ("train", "val", "test") for task in corpus.split(side)}  # type: ignore[arg-type]


def test_both_forms_become_the_same_task(tmp_path: Path) -> None:
    texts = ["a" * 30, "b" * 30, "c" * 30]
    first = [document("d", "p0", texts), question("t0", "d", [("u1", 0, 3)])]
    second = labelled("t0", "p0", [False, True, False], answers=["Ann"])
    second["chunks"] = [chunk | {"text": text} for chunk, text in zip(second["chunks"], texts, strict=True)]
    rest = three_projects()[1:]
    one = all_tasks(write(tmp_path / "one", [*first, *rest]))["t0"]
    two = all_tasks(write(tmp_path / "two", [second, *rest]))["t0"]
    assert one.chunks == two.chunks == tuple(texts)
    assert one.evidence == two.evidence == (False, True, False)
    assert one.exit == two.exit == ExitTarget(known=True, index=1)
    assert (one.answers, one.question, one.project) == (two.answers, two.question, two.project)
    assert one.source.endswith("one/corpus.jsonl:2")
    assert two.source.endswith("two/corpus.jsonl:1")


def test_documents_may_come_after_their_trajectories_and_be_shared(tmp_path: Path) -> None:
    rows = [question(f"t{n}", "d", [("u0", n, n + 1)]) for n in range(3)]
    rows += [document("d", "p0", ["abc def"]), *[labelled(f"x{p}", f"p{p}", [True]) for p in (1, 2)]]
    tasks = all_tasks(write(tmp_path / "c", rows))
    assert {tasks[f"t{n}"].chunks for n in range(3)} == {("abc def",)}
    assert {tasks[f"t{n}"].project for n in range(3)} == {"p0"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([question("t", "nowhere")], r":4: document_id 'nowhere': no such document"),
        ([document("d", "p", ["abc"]), question("t", "d", [("u9", 0, 1)])], r":5: evidence\[0\].unit_id: got 'u9'"),
        (
            [document("d", "p", ["abc"]), question("t", "d", [("u0", 0, 4)])],
            r":5: evidence\[0\].end: got 4, .* 3 charac",
        ),
        ([document("d", "p", ["a  b"]), question("t", "d", [("u0", 1, 3)])], r":5: evidence\[0\]: .* white space only"),
        (
            [document("d", "p", ["abc"]), question("t", "d", project="q")],
            r":5: project: got 'q', but document 'd' is of",
        ),
        ([question("t", "d", [("u0", 0, 4)]), document("d", "p", ["abc"])], r":4: evidence\[0\].end: got 4"),
    ],
)
def test_a_trajectory_that_does_not_fit_its_document_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(CorpusError, match=r"corpus\.jsonl" + message):
        open_at(write(tmp_path / "c", [*three_projects(), *rows]))


def test_spans_count_code_points_not_bytes_or_utf_16(tmp_path: Path) -> None:
    rows = [document("d", "p0", ["🙂é gold"]), question("t0", "d", [("u0", 3, 7)]), *three_projects()[1:]]
    assert all_tasks(write(tmp_path / "c", rows))["t0"].evidence == (True,)


def test_unlabelled_and_answerless_tasks(tmp_path: Path) -> None:
    rows = [document("d", "p0", ["abc"]), question("t0", "d", None, answers=None), *three_projects()[1:]]
    task = all_tasks(write(tmp_path / "c", rows))["t0"]
    assert (task.answers, task.evidence, task.exit) == (None, (None,), ExitTarget(known=False))


def test_an_exit_index_that_the_chunks_do_not_have_is_refused_with_its_line(tmp_path: Path) -> None:
    rows = [document("d", "p0", ["abc"]), question("t0", "d", [], exit_index=1), *three_projects()[1:]]
    with pytest.raises(CorpusError, match=r"corpus\.jsonl:2: exit_index: got 1, expected 0 to 0"):
        all_tasks(write(tmp_path / "c", rows))


def test_a_task_with_too_many_chunks_is_refused_or_dropped_and_counted(tmp_path: Path) -> None:
    long = labelled("long", "p0", [False] * 4)
    folder = write(tmp_path / "c", [long, *three_projects()])
    with pytest.raises(CorpusError, match=r"corpus\.jsonl:1: trajectory 'long' has 4 chunks, corpus.max_chunks is 3"):
        all_tasks(folder, max_chunks=3)
    corpus = open_at(folder, max_chunks=3, on_too_long="drop")
    sizes = [len(corpus.split(side)) for side in ("train", "val", "test")]  # type: ignore[arg-type]
    assert sum(sizes) == 3
    assert corpus.dropped == {"too_many_chunks": 1}


def test_a_prompt_that_does_not_fit_is_refused_or_dropped_and_counted(tmp_path: Path) -> None:
    # 30 + 4 of "Who?" + 12 of the longest chunk = 46
    long = labelled("a", "p0", [False, True])
    long["chunks"][1]["text"] = "x" * 12
    folder = write(tmp_path / "c", [long, *three_projects()])
    assert len(all_tasks(folder, 46)) == 4
    with pytest.raises(
        CorpusError, match=r"prompt of chunk 1 with a full memory has 46 tokens, max_prompt_length is 45"
    ):
        all_tasks(folder, 45)
    corpus = open_at(folder, 45, on_too_long="drop")
    assert sum(len(corpus.split(side)) for side in ("train", "val", "test")) == 3  # type: ignore[arg-type]
    assert corpus.dropped == {"prompt_too_long": 1}


def test_a_side_whose_tasks_are_all_dropped_is_refused(tmp_path: Path) -> None:
    corpus = open_at(write(tmp_path / "c", three_projects()), max_chunks=1, on_too_long="drop")
    with pytest.raises(Refused, match=r"the train split has no task \(dropped: \{'too_many_chunks': 1\}\)"):
        corpus.split("train")


def test_a_corpus_without_trajectories_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="the corpus has no trajectory"):
        open_at(write(tmp_path / "c", [document("d", "p", ["abc"])]))


@pytest.mark.parametrize("edit", ["byte", "row", "missing"])
def test_a_file_that_is_not_the_manifests_is_refused(tmp_path: Path, edit: str) -> None:
    folder = write(tmp_path / "c", three_projects())
    file, manifest = folder / "corpus.jsonl", folder / "manifest.json"
    if edit == "byte":
        file.write_bytes(file.read_bytes().replace(b"Who?", b"How?"))
        entry = manifest.read_text().splitlines()
        line = next(number for number, text in enumerate(entry, 1) if '"sha256"' in text)
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        message = rf'manifest\.json:{line}: SHA-256 of \S+corpus\.jsonl is {found}.* "sha256": "{found}", "records": 3'
    elif edit == "row":
        manifest.write_text(manifest.read_text().replace('"records": 3', '"records": 4'))
        message = r"corpus\.jsonl:3: got 3 rows, the manifest has 4"
    else:
        file.unlink()
        message = r"corpus\.jsonl:1: not found, but manifest\.json lists it"
    with pytest.raises(CorpusError, match=message):
        open_at(folder)


def test_tasks_are_in_file_order_and_read_again_by_offset(tmp_path: Path) -> None:
    rows = [labelled(f"t{n:02d}", f"p{n % 4}", [True]) for n in range(20)]
    corpus = open_at(write(tmp_path / "c", rows))
    train = corpus.split("train")
    names = [task.task_id for task in train]
    assert names == sorted(names)
    assert [train[n].task_id for n in (3, 0, -1)] == [names[3], names[0], names[-1]]
    assert [task.task_id for task in train[1:3]] == names[1:3]
    assert train.projects == tuple(sorted({task.project for task in train}))
    with pytest.raises(IndexError):
        train[len(train)]


@pytest.mark.parametrize("change", [b"How?", b"Who is it?"], ids=["later", "longer"])
def test_a_file_that_changes_after_the_scan_is_refused_when_a_row_is_read(tmp_path: Path, change: bytes) -> None:
    folder = write(tmp_path / "c", three_projects())
    train = open_at(folder).split("train")
    file = folder / "corpus.jsonl"
    kept, data = file.stat(), file.read_bytes()
    (folder / "new").write_bytes(data.replace(b"Who?", change))
    later = int(len(change) == len(b"Who?"))
    os.utime(folder / "new", ns=(kept.st_atime_ns, kept.st_mtime_ns + later))
    (folder / "new").replace(file)
    with pytest.raises(CorpusError, match=r"corpus\.jsonl:\d: the file was replaced or written to since"):
        train[0]


def test_inflated_text_that_another_process_puts_there_anew_is_read(tmp_path: Path, cache: Path) -> None:
    data = "".join(json.dumps(row) + "\n" for row in three_projects()).encode()
    train = open_at(write_raw(tmp_path / "c", gzip.compress(data), 3, "corpus.jsonl.gz")).split("train")
    (kept,) = (cache / "inflated").iterdir()
    (tmp_path / "same").write_bytes(data)
    (tmp_path / "same").replace(kept)
    assert train[0].question == "Who?"


def test_max_val_tasks_keeps_the_same_tasks_whatever_the_row_order(tmp_path: Path) -> None:
    rows = [labelled(f"t{n:02d}", f"p{n % 3}", [True]) for n in range(30)]
    one = open_at(write(tmp_path / "one", rows), max_val_tasks=4).split("val")
    two = open_at(write(tmp_path / "two", rows[::-1]), max_val_tasks=4).split("val")
    assert len(one) == 4
    assert {task.task_id for task in one} == {task.task_id for task in two}
    assert [task.task_id for task in one] == sorted(task.task_id for task in one)


def test_max_val_tasks_leaves_the_other_sides_whole(tmp_path: Path) -> None:
    rows = [labelled(f"t{n:02d}", f"p{n % 3}", [True]) for n in range(30)]
    corpus = open_at(write(tmp_path / "c", rows), max_val_tasks=4)
    assert (len(corpus.split("train")), len(corpus.split("val")), len(corpus.split("test"))) == (10, 4, 10)


def test_chunking_is_cached_and_touches_only_the_side_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = []
    for p in range(3):
        rows += [document(f"d{p}", f"p{p}", [f"text {p}"]), question(f"t{p}", f"d{p}")]
    folder = write(tmp_path / "c", rows)
    cut: list[str] = []
    real = loader.plan_chunks

    def spy(units: Any, *rest: Any) -> Any:
        cut.append(units[0].text)
        return real(units, *rest)

    monkeypatch.setattr(loader, "plan_chunks", spy)
    corpus = open_at(folder)
    assert cut == []
    first = list(corpus.split("train"))
    assert len(cut) == 1
    assert list(open_at(folder).split("train")) == first
    assert len(cut) == 1
    open_at(folder, chunk_tokens=41).split("train")
    assert len(cut) == 2  # another size is another cut


def test_a_side_that_was_refused_half_way_keeps_no_lock_on_the_cache(tmp_path: Path) -> None:
    """The refused corpus stays alive: a write it had begun and not ended would make the other wait a minute."""
    rows = [labelled("a", "p0", [True]), labelled("b", "p0", [False] * 4), *three_projects()]
    folder = write(tmp_path / "c", rows)
    refused = open_at(folder, max_chunks=3)
    started = time.perf_counter()
    for side in ("train", "val", "test"):
        with contextlib.suppress(CorpusError):
            refused.split(side)  # type: ignore[arg-type]
    assert len(all_tasks(folder)) == 5
    assert time.perf_counter() - started < 30


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POIMEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(Refused, match="set POIMEN_CACHE"):
        cache_module.cache_folder("chunks")


def test_a_broken_cache_file_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    folder = write(tmp_path / "c", three_projects())
    open_at(folder).split("train")
    (file,) = (cache / "chunks").iterdir()
    file.write_bytes(b"not a database" * 100)
    with pytest.raises(Refused, match="delete the file, or set POIMEN_CACHE"):
        open_at(folder)


def test_the_hash_of_a_corpus_changes_with_its_rows_and_its_manifest(tmp_path: Path) -> None:
    one = open_at(write(tmp_path / "one", three_projects())).sha256
    same = open_at(write(tmp_path / "same", three_projects())).sha256
    rows = open_at(write(tmp_path / "rows", [*three_projects(), labelled("t9", "p0", [True])])).sha256
    manifest = open_at(write(tmp_path / "manifest", three_projects(), licenses=["MIT"])).sha256
    assert one == same
    assert len({one, rows, manifest}) == 3


def test_the_same_history_on_two_sides_is_refused(tmp_path: Path) -> None:
    rows = three_projects()
    for row in rows[1:]:
        row["chunks"] = rows[0]["chunks"]
    with pytest.raises(CorpusError, match=r"the same history is at .* give both one project"):
        open_at(write(tmp_path / "c", rows))
    for row in rows:
        row["project"] = "p0"
    open_at(write(tmp_path / "c", [*rows, *[labelled(f"y{p}", f"q{p}", [True]) for p in (1, 2)]], overwrite=True))


def test_the_same_document_on_two_sides_is_refused(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for p in range(3):
        rows += [document(f"d{p}", f"p{p}", ["one text"]), question(f"t{p}", f"d{p}")]
    with pytest.raises(CorpusError, match=r"corpus\.jsonl:\d: the same history is at .*corpus\.jsonl:\d"):
        open_at(write(tmp_path / "c", rows))


GOLD = "On the third of May the release was moved to the last Friday of June."


@pytest.mark.parametrize(("gold", "fine"), [(GOLD, False), ("Yeah, that is right.", True), ("yeah yeah " * 6, True)])
def test_distinctive_evidence_on_two_sides_is_refused(tmp_path: Path, gold: str, fine: bool) -> None:
    rows: list[dict[str, Any]] = []
    for p in range(3):
        rows += [
            document(f"d{p}", f"p{p}", [f"text {p}", gold]),
            question(f"t{p}", f"d{p}", [("u1", 0, len(gold) - 1)]),
        ]
    folder = write(tmp_path / "c", rows)
    if fine:
        open_at(folder)
    else:
        with pytest.raises(CorpusError, match="the same evidence text is at"):
            open_at(folder)


def test_a_corpus_is_not_overwritten_by_accident_and_records_are_checked(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", three_projects())
    with pytest.raises(Refused, match="there is a corpus already"):
        write(folder, three_projects())
    with pytest.raises(Refused, match=r"corpus\.jsonl:1: record cannot be written: answers: got an empty list"):
        write(tmp_path / "d", [question("t", "d", answers=[])])
    assert not list((tmp_path / "d").iterdir())


def test_the_writer_gives_the_same_bytes_and_a_manifest_that_fits(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, three_projects(), dropped={"b": 2, "a": 1}) for name in ("one", "two"))
    assert (one / "corpus.jsonl").read_bytes() == (two / "corpus.jsonl").read_bytes()
    assert (one / "manifest.json").read_bytes() == (two / "manifest.json").read_bytes()
    manifest = json.loads((one / "manifest.json").read_text())
    assert manifest["files"][0]["records"] == 3
    assert manifest["dropped"] == {"a": 1, "b": 2}


def test_two_that_write_one_corpus_at_once_leave_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers that share a folder may share process ids as well."""
    replace_file = Path.replace

    def overtaken(self: Path, target: Path) -> Path:
        if target.name == "manifest.json":
            monkeypatch.setattr(Path, "replace", replace_file)
            write(tmp_path / "c", three_projects(), overwrite=True)
        return replace_file(self, target)

    def records() -> Iterator[dict[str, Any]]:
        write(tmp_path / "c", three_projects(), overwrite=True)
        monkeypatch.setattr(Path, "replace", overtaken)
        yield from three_projects()

    assert len(all_tasks(write(tmp_path / "c", records(), overwrite=True))) == 3
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["corpus.jsonl", "manifest.json"]
