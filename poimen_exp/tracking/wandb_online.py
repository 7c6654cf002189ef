"""Whether W&B can be reached with this machine's key: decided in seconds, before W&B itself would wait for minutes."""

from __future__ import annotations

import base64
import json
import netrc
import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from poimen_exp.errors import Refused

PROBE_TIMEOUT_S = 4.0
_INSTEAD = "or set tracking.wandb=offline and send the copy later with `wandb sync`"


def require_online() -> None:
    """Passes where runs can be sent now.

    Raises:
        Refused: no key, a key that the server does not accept, or no answer within ``PROBE_TIMEOUT_S``.
    """
    import wandb

    settings = wandb.setup().settings
    server = settings.base_url.rstrip("/")
    if settings.identity_token_file:
        _probe(server, None)
        return
    key = settings.api_key or _netrc_key(server)
    if not key:
        raise Refused(
            f"tracking.wandb=online: no key for {server} in WANDB_API_KEY or ~/.netrc; run `wandb login`, {_INSTEAD}"
        )
    _probe(server, key)


def _netrc_key(server: str) -> str | None:
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        entry = netrc.netrc(path).authenticators(urlsplit(server).netloc)
    except (OSError, netrc.NetrcParseError):
        return None
    return entry[2] if entry else None


def _probe(server: str, key: str | None) -> None:
    """Asks the server who the key belongs to. A thread, because looking a name up obeys no timeout."""
    outcome: list[str] = []
    thread = threading.Thread(target=lambda: outcome.append(_ask(server, key)), daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    problem = outcome[0] if outcome else f"no answer within {PROBE_TIMEOUT_S:g} s"
    if problem:
        raise Refused(f"tracking.wandb=online: {server}: {problem}; check network and key, {_INSTEAD}")


def _ask(server: str, key: str | None) -> str:
    """What is wrong, in a few words; empty where nothing is."""
    request = urllib.request.Request(
        f"{server}/graphql",
        data=json.dumps({"query": "query Viewer { viewer { id } }"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    if key is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(f"api:{key}".encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return "" if key is None else f"the key was not accepted (HTTP {error.code})"
    except (OSError, ValueError) as error:
        return f"not reached ({error})"
    known = isinstance(answer, dict) and (answer.get("data") or {}).get("viewer")
    return "" if known or key is None else "the key was not accepted (it belongs to nobody)"
