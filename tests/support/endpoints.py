"""Small real HTTP servers that answer like a chat endpoint, or otherwise."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlake.loop.config import Endpoint
from rlake.loop.inference.endpoint.policy import EndpointPolicy
from rlake.loop.inference.policy import Completion, Policy, Sampling
from rlake.store import Task


@dataclass
class Reply:
    """What a server answers."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    claims: int | None = None
    """Bytes that it says the body has."""
    until: threading.Event | None = None
    """Nothing is sent before this is set."""


@dataclass
class Server:
    """A server, and what it was asked."""

    url: str
    asked: list[dict[str, Any]]
    headers: list[dict[str, str]]


ASKED = [{"role": "user", "content": "2+2="}]
Answer = Callable[[dict[str, Any], int], Reply]
"""Given a request's body and its number, what is answered."""


def said(text: str | None = "4", *, choice: dict[str, Any] | None = None, **rest: Any) -> Reply:
    """Answer with a chat completion."""
    one = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return Reply(json.dumps({"choices": [one | (choice or {})], **rest}).encode())


def refused(status: int, message: str = "no", code: str | None = None, **headers: str) -> Reply:
    """Answer with an error, as OpenAI writes it."""
    error = {"error": {"message": message, "code": code}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(json.dumps(error).encode(), status, named)


@contextmanager
def answering(answer: Answer | Sequence[Reply] | Reply) -> Iterator[Server]:
    """Run a server; replies of a list are given one after the other, the last one from then on."""
    asked: list[dict[str, Any]] = []
    headers: list[dict[str, str]] = []
    lock = threading.Lock()

    def reply(body: dict[str, Any], number: int) -> Reply:
        if isinstance(answer, Reply):
            return answer
        if callable(answer):
            return answer(body, number)
        return answer[min(number, len(answer) - 1)]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.append(body)
                headers.append({k.lower(): v for k, v in self.headers.items()})
                number = len(asked) - 1
            self._send(reply(body, number))

        def _send(self, told: Reply) -> None:
            if told.until is not None:
                told.until.wait(60)
            try:
                self.send_response(told.status)
                size = len(told.body) if told.claims is None else told.claims
                for name, value in {"Content-Length": str(size), **told.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(told.body)
            except OSError:
                self.close_connection = True
            if told.claims is not None:
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}/v1", asked, headers)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)


def ask(server: Server, *, n: int = 1, tools: Any = None, **settings: Any) -> list[Completion]:
    """Ask an endpoint once."""
    sampling = settings.pop("sampling", Sampling())
    policy = EndpointPolicy(
        Endpoint(url=server.url, model="m", **settings), sampling=sampling, first_wait=0.001
    )
    with closing(policy):
        return asyncio.run(policy.generate(ASKED, n=n, tools=tools))


async def judged(task: Task, policy: Policy, *, judge: Policy) -> float:
    """Answers, and lets another model judge it."""
    [answer] = await policy.generate(task.messages)
    [verdict] = await judge.generate([{"role": "user", "content": f"Is {answer.text} right?"}])
    return float(verdict.text == "yes")
