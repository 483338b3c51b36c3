"""The studio's server in a process of its own, and what tests store for it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import httpx
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from rlake.store import Store

HOSTILE = "<img src=x onerror='window.hacked=1'></script><script>window.hacked=2</script>"
HOSTILE += "{{constructor.constructor('window.hacked=3')()}}"
"""A text that would run in a page that read it as HTML, or as a template."""
HOUR = "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range * b.range % 7 = 3"
"""A query that takes longer than any test waits."""


class Address(str):
    """The address of a server."""

    __slots__ = ("process",)
    process: int
    """The server's process."""


@contextmanager
def studio(place: str | Path, *options: str) -> Iterator[Address]:
    """Serve a store on a free port; yield the address, without the slash at its end."""
    words = [sys.executable, "-m", "rlake.loop.cli", "--store", str(place), "studio"]
    words += ["--port", "0", "--no-open", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http\S+?(?=/;)", server.stdout.readline())
            assert found is not None, "the server did not start; its error is above"
            address = Address(found[0])
            address.process = server.pid
            yield address
        finally:
            server.kill()


def hostile_rollouts(store: Store) -> str:
    """Store a group whose texts, names and numbers are an attack; return the ID of one."""
    messages = f'[{{"role": "user", "content": "{HOSTILE}"}}]'
    row = {
        "task_id": HOSTILE,
        "group_id": f"g{HOSTILE}",
        "run_id": HOSTILE,
        "source": "explorer",
        "finish_reason": HOSTILE,
        "messages": messages,
        "prompt_text": HOSTILE,
        "response_text": HOSTILE,
        "rewards": [{"name": HOSTILE, "value": 0.5}],
        "reward": 0.5,
    }
    ids = [f"x{i}{HOSTILE}" for i in range(2)]
    store.append(
        "experiences",
        [row | {"experience_id": one, "rollout_index": i} for i, one in enumerate(ids)],
    )
    return ids[0]


@contextmanager
def watching(url: str, address: str, watched: str, browsers: int) -> Iterator[list[int]]:
    """Open a page, and what it watches, as that many browsers would; yield what each was told.

    That is the number of messages.
    """
    received, sockets, threads = [0] * browsers, [], []

    def listen(place: int, socket: ClientConnection) -> None:
        try:
            for message in socket:
                received[place] += 1
                if message == "2":  # a ping of the server
                    socket.send("3")
        except ConnectionClosed:
            return  # the test is done

    try:
        for place in range(browsers):
            page = httpx.get(url + address, timeout=100).text
            found = re.search(r"'client_id': '([^']+)'", page)
            assert found is not None, page[:500]
            query = f"client_id={found[1]}&implicit_handshake=true&next_message_id=0"
            query += f"&tab_id=t{place}&old_tab_id=&document_id=d{place}&EIO=4&transport=websocket"
            there = f"{url.replace('http', 'ws')}/_nicegui_ws/socket.io/?{query}"
            sockets.append(connect(there, origin=url, max_size=None, open_timeout=100))  # pyright: ignore[reportArgumentType]
            sockets[-1].recv(timeout=100)
            sockets[-1].send("40")
            told = url.replace("http", "ws") + watched
            sockets.append(connect(told, origin=url, max_size=None, open_timeout=100))  # pyright: ignore[reportArgumentType]
            for socket in sockets[-2:]:
                threads.append(Thread(target=listen, args=(place, socket), daemon=True))
                threads[-1].start()
        yield received
    finally:
        for socket in sockets:
            socket.close()


def cpu_seconds(process: int) -> float:
    """Return the CPU time that a process has used, with the children that it waited for."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def is_at_rest(process: int) -> bool:
    """Return whether a process computes nothing, seen over a second.

    A thread that computes is runnable at each look, however many others want the processors.
    """
    busy = 0
    for _ in range(20):
        stats = Path(f"/proc/{process}/task").glob("*/stat")
        busy += any(one.read_text().rpartition(")")[2].split()[0] == "R" for one in stats)
        Event().wait(0.05)
    return busy < 10


def rests(process: int) -> bool:
    """Return whether a process comes to rest within 15 s, half the time of a question."""
    return any(is_at_rest(process) for _ in range(15))
