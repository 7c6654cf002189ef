"""The ``poimen`` console script."""

from __future__ import annotations

import sys

import typer

from poimen_exp.cli import adapter, corpus, data, model, runs
from poimen_exp.errors import EXIT_FAILED, EXIT_INTERRUPTED, PoimenError, path_trouble
from poimen_exp.wording import no_progress_bars

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(corpus.app, name="corpus", help="Check, convert, split and describe corpora.")
app.add_typer(data.app, name="data", help="Make Parquet files of single-turn prompts.")
app.add_typer(adapter.app, name="adapter", help="Publish, list, verify and serve adapters.")
app.add_typer(model.app, name="model", help="Make base models that no hub is needed for.")
runs.register(app)


def main() -> None:
    """Runs the command line; a refusal is one message on stderr and exit code 2."""
    no_progress_bars()
    try:
        app()
    except PoimenError as error:
        print(f"poimen: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"poimen: {path_trouble(error)}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except SystemExit as end:  # typer makes one of Ctrl-C
        if end.code == EXIT_INTERRUPTED:
            print("poimen: interrupted", file=sys.stderr)
        raise
