"""An OpenAI-compatible server on 127.0.0.1 that answers what a test tells it to, in vLLM's form."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from poimen_exp.gates.types import Generation

Answer = Callable[[str, tuple[int, ...]], Generation]
"""(model, prompt ids) -> what the model samples."""
PromptLogProbs = Callable[[str, Sequence[int]], Sequence[float]]


@dataclass
class FakeServer:
    """What a test sets, and the bodies of the requests that came."""

    answer: Answer
    prompt_log_probs: PromptLogProbs = lambda _, prompt: [-1.0] * (len(prompt) - 1)
    models: dict[str, str | None] = field(default_factory=lambda: {"base": None, "gates": "base"})
    answers_as: Callable[[str], str] = lambda model: model
    tokenize: Callable[[str], list[int]] = lambda text: list(text.encode())
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def respond(self, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "parent": parent} for name, parent in self.models.items()]}
        assert body is not None
        if body["model"] not in self.models:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if path == "/tokenize":
            return 200, {"tokens": self.tokenize(body["prompt"])}
        self.bodies.append(body)
        return 200, {"model": self.answers_as(body["model"]), "choices": [self._choice(body)]}

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = tuple(body["prompt"])
        if "prompt_logprobs" in body:
            values = self.prompt_log_probs(body["model"], prompt)
            entries = [{str(i): {"logprob": v}} for i, v in zip(prompt[1:], values, strict=True)]
            return {"prompt_logprobs": [None, *entries]}
        made = self.answer(body["model"], prompt)
        return {
            "token_ids": list(made.ids),
            "logprobs": {"token_logprobs": list(made.log_probs)},
            "finish_reason": "length" if made.clipped else "stop",
        }


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Runs ``fake`` in a thread until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*fake.respond(self.path, None))

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(*fake.respond(self.path, json.loads(data)))

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
