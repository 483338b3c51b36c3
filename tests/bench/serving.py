"""`rlake serve` under load: what is lost, what it costs, and what cannot bring it down.

A real server in a process of its own, a tiny model behind it, and as many clients as keep it busy.
`python -m bench serving`.
"""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rlake.store import connect

from .figure import Bench, Figure, say

CLIENTS = 8
START_SECONDS = 300.0
CONFIG = """
name: load
threads: 1
model:
  from_scratch: {hidden_size: 32, layers: 1, heads: 2, max_length: 256, alphabet: "0123456789+="}
algorithm: sft
serve: {sampling: {max_tokens: 8}}
"""


@dataclass
class Load:
    """What clients were answered."""

    ids: list[str] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    """Seconds."""
    errors: int = 0
    rss: list[int] = field(default_factory=list)
    """Bytes, as time went by."""
    seconds: float = 0.0

    def quantile(self, share: float) -> float:
        """Return an overhead that so many are below, in milliseconds."""
        found = sorted(self.overheads) or [0.0]
        return 1000 * found[min(len(found) - 1, int(share * len(found)))]


class Served:
    """A server in a process of its own."""

    def __init__(self, folder: Path, *, config: str = CONFIG, args: tuple[str, ...] = ()) -> None:
        (folder / "load.yaml").write_text(config)
        self.store = folder / "lake"
        command = [sys.executable, "-c", "from rlake.loop.cli import main; main()", "serve"]
        command += ["load.yaml", "--store", str(self.store), "--port", "0", "--json", *args]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        stop = threading.Timer(START_SECONDS, self.process.kill)
        stop.start()
        assert self.process.stdout is not None, "it is a pipe"
        line = self.process.stdout.readline()
        stop.cancel()
        if not line:
            raise RuntimeError(f"the server ended with {self.process.wait()} before it answered")
        self.told = json.loads(line)
        self.url = str(self.told["url"]).removesuffix("/v1")

    @property
    def rss(self) -> int:
        """Bytes that it holds in memory."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def end(self, sent: int = signal.SIGTERM) -> int:
        """Send a signal, and return how the server ended."""
        self.process.send_signal(sent)
        code = self.process.wait(120)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


async def load(served: Served, *, seconds: float, clients: int = CLIENTS) -> Load:
    """Ask without a pause, from several clients, some of them in sessions."""
    found, began = Load(), time.monotonic()

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        asked = 0
        while time.monotonic() - began < seconds:
            body: dict[str, Any] = {"messages": [{"role": "user", "content": f"{asked % 90}+1="}]}
            if number % 2:
                body["user"] = f"client-{number}-{asked // 5}"
            if number % 4 == 3:
                body["stream"] = True
            asked += 1
            with suppress(httpx.HTTPError):
                answer = await client.post("/v1/chat/completions", json=body)
                if answer.status_code == 200:
                    found.ids.append(_id(answer))
                    if message := answer.headers.get("x-rlake-overhead-ms"):  # no stream tells it
                        found.overheads.append(float(message) / 1000)
                    continue
            found.errors += 1

    async def watch() -> None:
        while True:
            found.rss.append(served.rss)
            await asyncio.sleep(seconds / 20)

    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        watches = asyncio.create_task(watch())
        await asyncio.gather(*(ask(client, i) for i in range(clients)))
        watches.cancel()
    found.seconds = time.monotonic() - began
    return found


def _id(answer: httpx.Response) -> str:
    if answer.headers["content-type"].startswith("application/json"):
        return answer.json()["id"]
    return json.loads(answer.text.partition("data: ")[2].partition("\n")[0])["id"]


def lost(store: Path, ids: list[str]) -> int:
    """Return how many answers stand in no row."""
    rows = connect(store, create=False).sql(
        "SELECT unnest(json_extract_string(metadata, '$.responses[*]')) FROM experiences"
    )
    return len(set(ids) - {row[0] for row in rows.fetchall()})


async def attack(url: str, *, connections: int = 10_000, megabytes: int = 100) -> dict[str, Any]:
    """Come without a token, with bodies too large, and with connections that ask for nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, connections + 512), hard))
    host, port = url.removeprefix("http://").split(":")
    idle: list[asyncio.StreamWriter] = []
    try:
        for _ in range(min(connections, hard - 512)):
            with suppress(OSError):
                idle.append((await asyncio.open_connection(host, int(port)))[1])
        idle[-1].write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127")  # and no more
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            path, head = "/v1/chat/completions", {"content-type": "application/json"}
            large = await _status(client, path, b" " * (megabytes << 20), head)
            page = await _status(client, path, b"{}", {"content-type": "text/plain"})
            began = time.perf_counter()
            body = {"messages": [{"role": "user", "content": "1+1="}]}
            answer = await client.post(path, json=body)
            return {
                "connections": len(idle),
                "large_body": large,
                "web_page": page,
                "still_answers": answer.status_code,
                "seconds": round(time.perf_counter() - began, 3),
            }
    finally:
        for one in idle:
            one.transport.abort()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _status(client: httpx.AsyncClient, path: str, body: bytes, head: dict[str, str]) -> int:
    """Return the status of an answer; 0 when the server hung up instead of reading it all."""
    try:
        return (await client.post(path, content=body, headers=head)).status_code
    except httpx.HTTPError:
        return 0


def serving(bench: Bench) -> Iterator[Figure]:
    """Load a server, attack it, end it, and compare what was answered with what is stored.

    For RLAKE_BENCH_SECONDS seconds, 60 when it is not set.
    """
    seconds = float(os.environ.get("RLAKE_BENCH_SECONDS", "60"))
    folder = bench.folder / "serving"
    folder.mkdir()
    served = Served(folder)
    asyncio.run(load(served, seconds=min(5.0, seconds / 4)))  # until everything is warm
    found = asyncio.run(load(served, seconds=seconds))
    say(f"{len(found.ids):,} answers in {found.seconds:.0f} s, {found.errors} errors")
    message = asyncio.run(attack(served.url))
    after = served.rss
    say(f"attacked: {message}, {after >> 20} MB; ended with {served.end()}")
    work = f"{CLIENTS} clients without a pause for {seconds:g} s, answers of 8 tokens"
    speed = round(len(found.ids) / found.seconds, 1)
    yield Figure("serve_lost", lost(served.store, found.ids), "answers", 0, work)
    yield Figure("serve_speed", speed, "answers/s", None, work)
    for share in (0.5, 0.99):
        name, budget = f"serve_overhead_p{100 * share:.0f}", 20.0 if share > 0.9 else None
        yield Figure(name, round(found.quantile(share), 2), "ms", budget, work)
    middle = found.rss[len(found.rss) // 2]
    grown = round((found.rss[-1] - middle) / (1 << 20), 1)
    yield Figure("serve_memory_growth", grown, "MB from half way to the end", None, work)
    attacked = f"beside {message['connections']:,} connections that ask for nothing"
    yield Figure("serve_seconds_attacked", message["seconds"], "s", None, attacked)
