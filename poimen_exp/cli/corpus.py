"""``poimen corpus ...``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poimen_exp.errors import EXIT_REFUSED, Refused
from poimen_exp.wording import counted, wide_console

if TYPE_CHECKING:
    from poimen_exp.corpus.agreement import GateAgreement
    from poimen_exp.corpus.audit.check import CheckReport
    from poimen_exp.corpus.chunking import TokenCounter
    from poimen_exp.corpus.loader import PromptTokens
    from poimen_exp.solo.settings import CorpusSettings

app = typer.Typer(no_args_is_help=True)

_MIN_KAPPA = 0.6
_POOL_TOKENS, _POOL_PROJECTS = 23_000, 10

Folder = Annotated[Path, typer.Argument(help="A poimen.corpus/1 folder.")]
Tokenizer = Annotated[
    str, typer.Option(help="Model folder or tokenizer.json; 'words' estimates words x 1.3 (prose only).")
]
ChunkTokens = Annotated[int, typer.Option(min=1, metavar="<int>", help="Tokens of a chunk (corpus.chunk_tokens).")]
MaxChunks = Annotated[int, typer.Option(min=1, metavar="<int>", help="Longest trajectory (corpus.max_chunks).")]
Seed = Annotated[int, typer.Option(help="corpus.split_seed.")]
Val = Annotated[float, typer.Option(help="corpus.val_fraction.")]
Test = Annotated[float, typer.Option(help="corpus.test_fraction.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _settings(
    path: Path, chunk_tokens: int, max_chunks: int, seed: int, val: float, test: float, **more: Any
) -> CorpusSettings:
    from poimen_exp.solo.settings import CorpusSettings

    rest: dict[str, Any] = {"min_kappa": _MIN_KAPPA, "allow_unmeasured": False, "on_too_long": "refuse"} | more
    return CorpusSettings(
        path=path,
        chunk_tokens=chunk_tokens,
        max_chunks=max_chunks,
        split_seed=seed,
        val_fraction=val,
        test_fraction=test,
        max_val_tasks=None,
        **rest,
    )


@app.command()
def check(
    folder: Folder,
    tokenizer: Tokenizer = "words",
    chunk_tokens: ChunkTokens = 5000,
    max_chunks: MaxChunks = 200,
    max_prompt_length: Annotated[
        int | None, typer.Option(help="Check prompts too; needs a model folder as --tokenizer.")
    ] = None,
    memory_tokens: Annotated[int, typer.Option(help="gates.memory_tokens, for --max-prompt-length.")] = 1024,
    min_kappa: Annotated[float, typer.Option(help="corpus.min_kappa.")] = _MIN_KAPPA,
    allow_unmeasured: Annotated[bool, typer.Option("--allow-unmeasured", help="corpus.allow_unmeasured.")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Count too long trajectories instead of refusing them.")] = False,
    split_seed: Seed = 0,
    val_fraction: Val = 0.15,
    test_fraction: Test = 0.15,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
) -> None:
    """Problems the loader would refuse (exit 2), and audits of labels that can be had without reading."""
    from poimen_exp.corpus.audit.check import check_corpus
    from poimen_exp.corpus.counting import load_counter

    settings = _settings(
        folder, chunk_tokens, max_chunks, split_seed, val_fraction, test_fraction,
        min_kappa=min_kappa, allow_unmeasured=allow_unmeasured, on_too_long="drop" if drop else "refuse",
    )  # fmt: skip
    prompt = None if max_prompt_length is None else _prompt_tokens(tokenizer, memory_tokens)
    report = check_corpus(settings, load_counter(tokenizer), prompt, max_prompt_length or 0)
    if html is not None:
        from poimen_exp.corpus.audit.report import write_html

        write_html(report, html)
    if as_json:
        from poimen_exp.corpus.audit.report import as_json as to_json

        _print_json(to_json(report))
    else:
        _print_check(report, tokenizer, chunk_tokens)
    if report.n_problems:
        raise typer.Exit(EXIT_REFUSED)


def _prompt_tokens(tokenizer: str, memory_tokens: int) -> PromptTokens:
    """Prompt lengths of the full wording around a full memory."""
    if not Path(tokenizer).is_dir():
        raise Refused(f"--max-prompt-length: got --tokenizer {tokenizer}, expected a model folder with a chat template")
    from transformers import AutoTokenizer

    from poimen_exp.gates.codec import HfCodec
    from poimen_exp.gates.protocol import GateProtocol

    codec = HfCodec(AutoTokenizer.from_pretrained(tokenizer))
    overhead = GateProtocol(codec, "chunk_first", "full", memory_tokens).turn_overhead() + memory_tokens
    return lambda question, chunk: overhead + len(codec.encode_plain(question)) + len(codec.encode_plain(chunk))


def _print_check(report: CheckReport, tokenizer: str, chunk_tokens: int) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = wide_console()
    for problem in report.problems:
        console.print(f"[red]problem[/red] {escape(problem)}", soft_wrap=True, highlight=False)
    if report.n_problems > len(report.problems):
        console.print(f"... and {report.n_problems - len(report.problems):,} more problems")
    measure = "words x 1.3" if tokenizer == "words" else tokenizer
    table = Table(title=escape(f"{report.corpus_id or report.path} at {chunk_tokens} tokens ({measure})"))
    for column in ("audit", "value", ""):
        table.add_column(column)
    for audit in report.audits:
        table.add_row(
            audit.name, escape(audit.shown), f"[yellow]{audit.verdict}[/yellow]" if audit.warn else audit.verdict
        )
    if report.audits:
        console.print(table)
    for reason, count in report.dropped.items():
        console.print(f"dropped: {reason}: {count}")
    note = report.split.note if report.split is not None else ""
    if note:
        console.print(escape(note))
    labels = f", labels {report.label_status}" if report.label_status else ""
    console.print(f"{counted(report.n_problems, 'problem')}, {counted(len(report.warnings), 'warning')}{labels}")


@app.command()
def stats(
    folder: Folder,
    tokenizer: Tokenizer = "words",
    chunk_tokens: ChunkTokens = 5000,
    split_seed: Seed = 0,
    val_fraction: Val = 0.15,
    test_fraction: Test = 0.15,
    as_json: AsJson = False,
) -> None:
    """Lengths, evidence, exits and the sizes of the sides."""
    from poimen_exp.corpus.audit.facts import gather
    from poimen_exp.corpus.cache import PlanCache
    from poimen_exp.corpus.chunking import tokenizer_sha256
    from poimen_exp.corpus.counting import load_counter
    from poimen_exp.corpus.index import scan
    from poimen_exp.corpus.lines import refuse
    from poimen_exp.corpus.loader import TaskReader, by_document, split_tasks
    from poimen_exp.corpus.manifest import load_manifest
    from poimen_exp.corpus.stats import corpus_stats, shown_stats

    codec = load_counter(tokenizer)
    settings = _settings(folder, chunk_tokens, 10**9, split_seed, val_fraction, test_fraction)
    index = scan(load_manifest(folder, allow_unmeasured=True), refuse)
    _refuse_empty(len(index.tasks), folder)
    cache = PlanCache(tokenizer_sha256(codec))
    facts = gather(index, TaskReader(index, chunk_tokens, codec, cache), by_document(index))
    cache.close()
    found = corpus_stats(facts, split_tasks(index, settings))
    more = {"documents": len(index.documents), "tokenizer_sha256": tokenizer_sha256(codec)}
    if as_json:
        _print_json({**asdict(found), **more})
    else:
        _print_pairs(f"{folder} at {chunk_tokens} tokens", {**shown_stats(found), **more})


@app.command()
def split(
    folder: Folder,
    split_seed: Seed = 0,
    val_fraction: Val = 0.15,
    test_fraction: Test = 0.15,
    as_json: AsJson = False,
) -> None:
    """Which project is on which side: the split that a run with these settings has."""
    import numpy as np

    from poimen_exp.corpus.index import scan
    from poimen_exp.corpus.lines import refuse
    from poimen_exp.corpus.loader import split_tasks
    from poimen_exp.corpus.manifest import load_manifest
    from poimen_exp.corpus.overlap import check_overlap
    from poimen_exp.corpus.split import SIDES

    settings = _settings(folder, 1, 1, split_seed, val_fraction, test_fraction)
    index = scan(load_manifest(folder, allow_unmeasured=True), refuse)
    _refuse_empty(len(index.tasks), folder)
    sides = split_tasks(index, settings)
    check_overlap(index, sides, refuse)
    counts = np.bincount(index.tasks["project"], minlength=len(index.projects))
    tasks = {name: int(counts[number]) for number, name in enumerate(index.projects)}
    value = {side: {project: tasks[project] for project in sides.projects(side)} for side in SIDES}
    if as_json:
        _print_json(value)
    else:
        shown: dict[str, Any] = {
            side: f"{counted(len(projects), 'project')}, "
            f"{counted(sum(projects.values()), 'trajectory', 'trajectories')}: {', '.join(projects)}"
            for side, projects in value.items()
        }
        _print_pairs(f"{folder} at split seed {split_seed}", shown)
        if sides.note:
            typer.echo(sides.note)


@app.command()
def agreement(
    labels_a: Annotated[Path, typer.Argument(help="The first labeler's file; its labels are the corpus's.")],
    labels_b: Annotated[Path, typer.Argument(help="The second labeler's file.")],
    corpus: Annotated[
        Path | None, typer.Option(help="Second-form corpus file whose labels are pinned; left out: LABELS_A.")
    ] = None,
    labeler_a: Annotated[str | None, typer.Option(help="Name of the first labeler; left out: the file's name.")] = None,
    labeler_b: Annotated[str | None, typer.Option(help="Name of the second labeler.")] = None,
    design: Annotated[
        str, typer.Option(help="independent_blind, if neither labeler saw the other's labels.")
    ] = "not stated",
    chunk_tokens: Annotated[int | None, typer.Option(help="Size the chunks were cut to.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Model folder or tokenizer.json they were cut with.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the manifest's labels object to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Cohen's kappa for update and exit with an interval by project, and the manifest block."""
    from poimen_exp.corpus import agreement as kappa
    from poimen_exp.corpus.contract import same_labeler

    names = (labeler_a or labels_a.stem, labeler_b or labels_b.stem)
    if same_labeler(*names):
        raise Refused(
            f"agreement: got labelers {list(names)!r}, expected two different ones; name them: --labeler-a, --labeler-b"
        )
    first, second = kappa.read_labels(labels_a), kappa.read_labels(labels_b)
    results = kappa.measure(first, second)
    pinned = first if corpus is None else kappa.read_labels(corpus)
    chunking = _chunking(chunk_tokens, tokenizer)
    block = kappa.manifest_labels(results, kappa.label_hashes(pinned), names, design, chunking)
    for reason in _run_refusals(block):
        typer.echo(f"a run would refuse this: {reason}", err=True)
    if out is not None:
        out.write_text(json.dumps(block, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        _print_json(block)
        return
    for one in results:
        _print_agreement(one)
    _print_json({"labels": block})


def _print_agreement(one: GateAgreement) -> None:
    text = "undefined (a labeler used one class only)" if one.kappa is None else f"{one.kappa:.4f}"
    interval = "no interval" if one.low is None else f"95 % by project [{one.low:.4f}, {one.high:.4f}]"
    pair = one.confusion
    _print_pairs(
        one.gate,
        {
            "kappa": f"{text}, {interval}",
            "confusion": f"pp {pair.pp}, pn {pair.pn}, np {pair.np}, nn {pair.nn}",
            "positives": f"{pair.positives[0]} and {pair.positives[1]} of {pair.total} chunks",
            "sample": f"{one.n_trajectories} trajectories, {one.n_projects} projects; {one.skipped} chunks skipped",
        },
    )


def _run_refusals(labels: dict[str, Any]) -> list[str]:
    """What the loader says against a manifest's ``labels``, at the default ``corpus.min_kappa``."""
    from poimen_exp.corpus.contract import check_block, read_block

    read = {gate: read_block(gate, labels) for gate in labels}
    found = [problem or check_block(gate, block, _MIN_KAPPA, None) for gate, (block, problem) in read.items()]
    return [problem.message for problem in found if problem is not None]


def _chunking(chunk_tokens: int | None, tokenizer: str | None) -> Any:
    from poimen_exp.corpus.chunking import tokenizer_sha256
    from poimen_exp.corpus.contract import Chunking
    from poimen_exp.corpus.counting import load_counter

    if (chunk_tokens is None) != (tokenizer is None):
        raise Refused("--chunk-tokens and --tokenizer: got one of them, expected both, or neither (chunks in the file)")
    if chunk_tokens is None or tokenizer is None:
        return None
    return Chunking(chunk_tokens, tokenizer_sha256(load_counter(tokenizer)))


@app.command()
def convert(
    paths: Annotated[
        list[str], typer.Argument(help="hotpotqa|musique|locomo|qmsum INPUT OUT; with --from: INPUT OUT.")
    ],
    source: Annotated[str | None, typer.Option("--from", help="hotpotqa, musique, locomo, qmsum or jsonl.")] = None,
    mapping: Annotated[list[str] | None, typer.Option("--map", help="jsonl: field=path, repeated.")] = None,
    tokens: Annotated[float, typer.Option(help="hotpotqa, musique: size of a pooled document.")] = _POOL_TOKENS,
    projects: Annotated[
        int, typer.Option(min=1, metavar="<int>", help="hotpotqa, musique: keys of the split.")
    ] = _POOL_PROJECTS,
    documents: Annotated[
        int, typer.Option(min=1, max=1000, metavar="<int>", help="hotpotqa, musique: documents a question.")
    ] = 1,
    tokenizer: Tokenizer = "words",
    constructed: Annotated[
        bool,
        typer.Option("--constructed", help="jsonl: the labels are true by construction; else kappa must be measured."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a corpus that is there.")] = False,
) -> None:
    """A public set, or your own JSON lines, to a corpus folder."""
    from poimen_exp.corpus.convert import write_conversion

    if source is None and len(paths) == 3:
        source, paths = paths[0], paths[1:]
    if source is None or len(paths) != 2:
        raise Refused(f"convert: got {' '.join(paths)!r}, expected SET INPUT OUT, or --from SET INPUT OUT")
    if constructed and source != "jsonl":
        raise Refused(f"--constructed: only for jsonl, got {source}")
    conversion = _conversion(source, Path(paths[0]), mapping or [], tokens, projects, tokenizer, documents)
    labels: dict[str, Any] = {}
    if source == "jsonl" and not constructed:
        labels = {"labels": {gate: {"origin": "labeled", "agreement": None} for gate in ("update", "exit")}}
    manifest = write_conversion(conversion, Path(paths[1]), overwrite, **labels)
    written = json.loads(manifest.read_text(encoding="utf-8"))
    typer.echo(f"{manifest}: {written['files'][0]['records']} rows")
    for reason, count in written["dropped"].items():
        typer.echo(f"dropped: {reason}: {count}")
    if labels:
        typer.echo("labels: measure two labelers with 'poimen corpus agreement' and put its block into the manifest")


def _conversion(
    source: str, path: Path, mapping: list[str], tokens: float, projects: int, tokenizer: str, documents: int
) -> Any:
    from poimen_exp.corpus.convert import hotpotqa, locomo, mapped, musique, qmsum, words_x_1_3

    pooled = source in ("hotpotqa", "musique")
    given = {
        "--tokens": tokens != _POOL_TOKENS,
        "--projects": projects != _POOL_PROJECTS,
        "--documents": documents != 1,
        "--tokenizer": tokenizer != "words",
    }
    for option, changed in given.items():
        if changed and not pooled:
            raise Refused(f"{option}: only for hotpotqa and musique, got {source}")
    if source == "jsonl":
        return mapped.convert(path, mapped.parse_map(mapping))
    if mapping:
        raise Refused(f"--map: only for jsonl, got {source}")
    if pooled:
        count = words_x_1_3 if tokenizer == "words" else _counter(tokenizer)
        return (hotpotqa if source == "hotpotqa" else musique).convert(path, tokens, projects, count, documents)
    if source in ("locomo", "qmsum"):
        return (locomo if source == "locomo" else qmsum).convert(path)
    raise Refused(f"convert: got {source!r}, expected hotpotqa, musique, locomo, qmsum or jsonl")


def _counter(tokenizer: str) -> Any:
    from poimen_exp.corpus.counting import load_counter

    codec: TokenCounter = load_counter(tokenizer)
    return lambda text: len(codec.encode_plain(text))


def _refuse_empty(tasks: int, folder: Path) -> None:
    if not tasks:
        raise Refused(f"{folder}: the corpus has no trajectory")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def _print_pairs(title: str, value: dict[str, Any]) -> None:
    typer.echo(title)
    for key, shown in value.items():
        typer.echo(f"  {key}: {shown}")
