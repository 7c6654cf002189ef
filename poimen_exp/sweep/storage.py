"""Where trials are kept: SQLite in the sweep's folder, any Optuna URL, or a journal file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from poimen_exp.errors import Refused

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

DATABASE_NAME = "study.db"
JOURNAL_SCHEME = "journal://"
BUSY_TIMEOUT_S = 60
"""How long a writer waits for another one's SQLite transaction; Optuna's own 5 s are short for a slow disk."""


def open_storage(url: str | None, folder: Path) -> BaseStorage:
    """The storage behind ``sweep.storage``.

    Args:
        url: Optuna URL, ``journal://PATH``, or None for ``study.db`` in ``folder``.

    Raises:
        Refused: a URL that cannot be opened.
    """
    url = f"sqlite:///{(folder / DATABASE_NAME).absolute()}" if url is None else url
    if url.startswith(JOURNAL_SCHEME):
        return _journal(Path(url.removeprefix(JOURNAL_SCHEME)))
    return _database(url)


def shown(url: str | None) -> str | None:
    """The URL with its password starred out, as it may stand in files and messages."""
    if url is None or url.startswith(JOURNAL_SCHEME):
        return url
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError as error:
        raise Refused(
            f"sweep.storage: got {url!r}, expected an Optuna URL (sqlite:///FILE, postgresql://...) or "
            f"{JOURNAL_SCHEME}PATH"
        ) from error


def _journal(path: Path) -> BaseStorage:
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(path)))


def _database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import IntegrityError, OperationalError

    shown_url = shown(url)
    arguments = {"timeout": BUSY_TIMEOUT_S} if make_url(url).get_backend_name() == "sqlite" else {}
    last: Exception | None = None
    for attempt in range(5):
        try:
            return RDBStorage(url, engine_kwargs={"connect_args": arguments})
        except ImportError as error:
            raise Refused(f"sweep.storage: {shown_url} needs a database driver: {error}") from error
        except (OperationalError, IntegrityError) as error:
            # Two sweeps that make the tables of one database at the same moment: the second try finds them made.
            last = error
            time.sleep(0.1 * (attempt + 1))
    raise Refused(f"sweep.storage: {shown_url} cannot be opened: {last}") from last
