"""Python processes that tests talk to: `from support.processes import said, start, tell`."""

import os
import subprocess
import sys
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
