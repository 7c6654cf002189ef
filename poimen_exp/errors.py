"""The errors that end a command, and the exit code each one carries."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


class PoimenError(Exception):
    """Anything the program says about itself. The message has: what, got, expected, where, what to do."""

    exit_code = EXIT_FAILED


class Refused(PoimenError):
    """Refused before any work: configuration, overrides, corpus, gate check, plan, adapter."""

    exit_code = EXIT_REFUSED


class CorpusError(Refused):
    """A corpus that cannot be read as ``poimen.corpus/1``; the message starts with ``file:line`` or a missing file."""


class RunFailed(PoimenError):
    """A run that started and must not go on: too many failed rollouts, skipped steps, a collapse."""


def path_trouble(error: OSError) -> str:
    """What the operating system says of a path that a person named; an error that names none is raised again."""
    if error.filename is None:
        raise error
    return f"{error.filename}: {error.strerror}; expected a path that can be read and written here"
