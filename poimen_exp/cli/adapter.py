"""``poimen adapter publish | list | show | verify | serve | smoke | export``"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from poimen_exp.adapters.probe import ProbeReport

app = typer.Typer(no_args_is_help=True)

DEFAULT_REGISTRY = "adapters"
RegistryOption = Annotated[
    str, typer.Option("--registry", envvar="POIMEN_REGISTRY", help="Folder or fsspec URL of the registry.")
]
BaseOption = Annotated[
    Path | None, typer.Option("--base", help="Folder of the base model. [default: where the manifest says it was]")
]
ReferenceArgument = Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="An adapter; the latest version.")]


class DeviceChoice(StrEnum):
    """What the server runs on."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class DtypeChoice(StrEnum):
    """Data types of a merged model."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def publish(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of an adapter.")],
    name: Annotated[str, typer.Option("--name", help="Name in the registry: a-z, 0-9, '.', '_', '-'.")],
    registry: RegistryOption = DEFAULT_REGISTRY,
    base: BaseOption = None,
) -> None:
    """Check an adapter, prove that it has an effect, and publish it as the next version of NAME."""
    from poimen_exp.adapters.publish import publish_adapter
    from poimen_exp.adapters.registry import Registry

    published, report = publish_adapter(run, name, Registry(registry), base)
    print(f"published {published}")
    _print_probe(report)


@app.command("list")
def list_adapters(context: typer.Context, registry: RegistryOption = DEFAULT_REGISTRY) -> None:
    """List the adapters of a registry: versions, base model, label status, objective."""
    from rich.table import Table

    from poimen_exp.adapters.registry import Registry
    from poimen_exp.errors import Refused
    from poimen_exp.wording import wide_console

    store = Registry(registry)
    source = context.get_parameter_source("registry")
    if store.is_missing_folder() and source is not None and source.name != "DEFAULT":
        raise Refused(f"registry {registry}: there is no such folder; expected one that `poimen adapter publish` made")
    names = store.names()
    if not names:
        print(f"no adapters in {registry}")
        return
    table = Table("adapter", "versions", "latest", "base model", "labels", "val/reward/total")
    for name in names:
        manifest = store.show(name).manifest
        objective = manifest.metrics.get("val/reward/total")
        shown = "" if objective is None else f"{objective:.3f}"
        versions = store.versions(name)
        table.add_row(
            name, str(len(versions)), store.latest(name), manifest.base_model.name, manifest.label_status or "-", shown
        )
    wide_console().print(table)


@app.command()
def show(reference: ReferenceArgument, registry: RegistryOption = DEFAULT_REGISTRY) -> None:
    """Print the manifest of a version (poimen.json)."""
    from poimen_exp.adapters.registry import Registry, parse_reference

    print(Registry(registry).show(*parse_reference(reference)).manifest.to_json(), end="")


@app.command()
def verify(reference: ReferenceArgument, registry: RegistryOption = DEFAULT_REGISTRY, base: BaseOption = None) -> None:
    """Fetch a version and check hashes, keys, shapes, rank, base model and effect."""
    from poimen_exp.adapters.publish import verify_adapter
    from poimen_exp.adapters.registry import Registry

    found, report = verify_adapter(reference, Registry(registry), base)
    print(f"{found}: hashes agree")
    if report is None:
        recorded = found.manifest.base_model
        print(
            f"keys, shapes, rank, base model and effect NOT checked: {recorded.path} is not here; name it with --base"
        )
        raise typer.Exit(2)
    print("keys, shapes, rank and base model agree")
    _print_probe(report)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    references: Annotated[
        list[str], typer.Argument(metavar="NAME[@VERSION]...", help="Adapters of the registry, or folders.")
    ],
    registry: RegistryOption = DEFAULT_REGISTRY,
    base: BaseOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    device: Annotated[DeviceChoice, typer.Option(help="What the server runs on.")] = DeviceChoice.auto,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and response together. [default: fits the adapters' chunks]")
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the command instead of running it.")] = False,
) -> None:
    """Run the vLLM OpenAI server with the adapters mounted. Options unknown here are vLLM's."""
    from poimen_exp.adapters.publish import base_folder, resolve_adapter
    from poimen_exp.adapters.registry import Registry
    from poimen_exp.adapters.serve import ServeOptions, find_server_python, pick_server_device, serve_command
    from poimen_exp.adapters.serve import serve_notes as notes_of

    names, extra = _split_extra([*references, *context.args])
    store = Registry(registry)
    resolved = [resolve_adapter(reference, store) for reference in names]
    options = ServeOptions(
        adapters={name: folder for folder, name in resolved},
        base_model=base_folder(resolved[0][0], base),
        python=find_server_python(),
        host=host,
        port=port,
        device=pick_server_device(device.value),
        max_model_len=max_model_len,
        extra=tuple(extra),
    )
    command = serve_command(options)
    for note in notes_of(options):
        print(f"note: {note}", file=sys.stderr)
    print(command.as_shell(), file=sys.stdout if print_only else sys.stderr, flush=True)
    if not print_only:
        command.execute()


@app.command()
def smoke(
    url: Annotated[str, typer.Argument(help="Of the server: http://host:port")],
    name: Annotated[str, typer.Argument(help="Name under which the adapter is served.")],
) -> None:
    """Ask a running server for base and adapter: status 200, the named model answered, the adapter has an effect."""
    from poimen_exp.adapters.smoke import smoke as run_smoke

    report = run_smoke(url, name)
    print(f"{report.adapter} answered with status 200 ({report.completion_tokens} tokens), {report.base} too")
    print(f"effect: log-probs of the probe prompt differ by up to {report.effect:.4g} nats")
    if report.leaks:
        print(
            f"the server answers requests for {report.base} from {report.adapter} when both are batched: start it with "
            "--max-loras one more than adapters (`poimen adapter serve` does)",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    print(f"{report.base} keeps its own log-probs beside requests for {report.adapter}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of an adapter.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    merge: Annotated[bool, typer.Option("--merge", help="Write a plain model: base plus adapter.")] = False,
    base: BaseOption = None,
    dtype: Annotated[
        DtypeChoice | None, typer.Option(help="Of a merged model. [default: the adapter's training type]")
    ] = None,
) -> None:
    """Copy the adapter of a run, checked; or with --merge write base plus adapter as a plain model folder."""
    from poimen_exp.adapters.manifest import read_manifest
    from poimen_exp.adapters.merge import merge_adapter
    from poimen_exp.adapters.publish import adapter_folder, base_folder, copy_adapter

    folder = adapter_folder(run)
    model = base_folder(folder, base)
    if not merge:
        print(f"wrote {copy_adapter(folder, model, out)}")
        return
    report = merge_adapter(folder, model, out, dtype.value if dtype else read_manifest(folder).dtype)
    print(f"wrote {report.folder} ({report.dtype})")
    print(f"logits differ from base plus adapter by {report.difference:.3g}, tolerance {report.tolerance:.3g}")


def _split_extra(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Adapter names, and from the first option on what is vLLM's."""
    cut = next((place for place, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    return arguments[:cut], arguments[cut:]


def _print_probe(report: ProbeReport) -> None:
    print(
        f"effect: log-probs of the probe prompt ({report.prompt_tokens} tokens) differ from the base model's by up to "
        f"{report.effect:.4g} nats; a reload gives equal logits"
    )
