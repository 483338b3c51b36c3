"""Processes that tests talk to: by their streams, or at an address of this machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

TESTS = str(Path(__file__).parents[1])


def start(code: str, *arguments: object) -> "subprocess.Popen[str]":
    """Run code, which finds `support`, in another process."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])},
    )


def said(process: "subprocess.Popen[str]") -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: "subprocess.Popen[str]", line: object = "") -> None:
    """Write a line to a process."""
    assert process.stdin is not None
    print(line, file=process.stdin, flush=True)


@contextmanager
def listening(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start a server that is given a listening socket's descriptor, and yield its address.

    The socket listens before the server starts, so nobody else takes its port, and clients wait.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=64) as taken:
        port, number = taken.getsockname()[1], taken.fileno()
        process = subprocess.Popen(
            [*command, str(number)], env=env, pass_fds=[number], stderr=subprocess.DEVNULL
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
