"""Running a Python program within limits, and saying how it ended."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ...store.errors import JobError
from ..concurrency import run_apart, shared_semaphore
from .syscalls import allowed

_PROGRAM = Path(__file__).with_name("jail.py")
_GRACE = 5.0
"""Seconds to set a sandbox up and take it down, added to the limit of the code."""

How = Literal[
    "done", "error", "timeout", "memory", "disk", "processes", "network", "output", "crash"
]

_SAID: dict[How, str] = {
    "memory": r"^(MemoryError|.*Cannot allocate memory)",
    "disk": r"No space left on device|File too large|Disk quota exceeded",
    "processes": r"^(BlockingIOError|RuntimeError: can't start new thread)|Resource temporarily",
    "network": r"Network is unreachable|name resolution|gaierror",
}
"""What the last line of an error that nobody caught says of the limit that was met."""

_FRAME = re.compile(r"Traceback |\s")
_NO_SOCKET = re.compile(r"\[Errno 1\] Operation not permitted>?$")


@dataclass(frozen=True)
class Limits:
    """What code under test may use."""

    seconds: float = 10.0
    """Of the clock, and of the processor."""
    memory: int = 512 << 20
    """Bytes of address space of each process, and of memory of all together."""
    disk: int = 16 << 20
    """Bytes of files; without namespaces, of each file."""
    processes: int = 32
    """Processes and threads at once; not enforced for root without namespaces."""
    output: int = 64 << 10
    """Bytes of output and of errors that are kept; a program that prints more is ended."""
    namespaces: bool = True
    """False: as where the kernel makes none."""
    landlock: bool = True
    """False: as where the kernel has none, and without namespaces cannot keep files from code."""
    unconfined: bool = False
    """Run the code also where neither is there: it reads and writes what its user may."""


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it printed."""

    how: How
    code: int
    """Its exit status, or the number of the signal that ended it as a negative number."""
    output: str
    errors: str
    isolated: bool
    """Whether it ran in namespaces of its own."""

    @property
    def detail(self) -> str:
        """How it ended, with the last line of its errors."""
        lines = self.errors.strip().splitlines()
        return f"{self.how}: {lines[-1][:300]}" if lines and self.how != "done" else self.how


async def run_python(source: str, *, stdin: str = "", limits: Limits | None = None) -> Ended:
    """Run a Python program that nobody trusts, to its end or that of its limits.

    It has the standard library, no environment, and an empty folder. At most as many run at once
    as there are processors. Raises JobError when this machine offers no way to confine it.

    >>> asyncio.run(run_python("print(6 * 7)")).output
    '42\\n'
    """
    limits = limits or Limits()
    async with shared_semaphore("sandbox", os.cpu_count() or 1):
        folder = tempfile.mkdtemp(prefix="rlake-sandbox-")
        try:
            Path(folder, "main.py").write_text(source, encoding="utf-8", errors="replace")
            return await _run(folder, stdin, limits)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


@cache
def protection() -> str:
    """Say what protects this machine from code under test."""
    try:
        ended = run_apart(run_python("pass"))
    except JobError as error:
        return f"nothing, and does not run: {error}"
    if ended.isolated:
        return "namespaces: no network, no other process or file, another user, and limits"
    return "Landlock: no files but its own, no sockets, no signals, a list of calls, and limits"


async def _run(folder: str, stdin: str, limits: Limits) -> Ended:
    message, tells = os.pipe()
    machine = os.uname().machine
    calls = {
        "isolated": allowed(machine, namespaces=True),
        "bare": allowed(machine, namespaces=False),
    }
    told_it = {**asdict(limits), "folder": folder, "tells": tells, "calls": calls}
    config = json.dumps(told_it)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(_PROGRAM), config,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},  # keys of this process are in its environment
            cwd=folder,
            pass_fds=[tells],
            start_new_session=True,  # or `killpg` below would end this process too
        )  # fmt: skip
    except BaseException:
        os.close(message)
        raise
    finally:
        os.close(tells)  # while it is open here, the pipe never ends
    try:
        printed = await _printed(process, stdin.encode(), limits)
        if printed is None:
            return Ended("timeout", -signal.SIGKILL, "", "", isolated=False)
        said = json.loads(os.read(message, 4096) or b"{}")
        return _ended(said, *printed, limits)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        os.close(message)


async def _printed(
    process: asyncio.subprocess.Process, stdin: bytes, limits: Limits
) -> tuple[bytes, bytes] | None:
    """Return what it prints, up to a byte more than it may; None if it does not end."""
    assert process.stdin, "it was asked for"
    assert process.stdout, "it was asked for"
    assert process.stderr, "it was asked for"
    writing = asyncio.ensure_future(_feed(process.stdin, stdin))
    reading = [_read(process, s, limits.output) for s in (process.stdout, process.stderr)]
    try:
        async with asyncio.timeout(limits.seconds + _GRACE):
            output, errors = await asyncio.gather(*reading)
            await process.wait()
            return output, errors
    except TimeoutError:
        return None
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError, ConnectionError):
            await writing


async def _feed(pipe: asyncio.StreamWriter, stdin: bytes) -> None:
    with suppress(ConnectionError):
        pipe.write(stdin)
        await pipe.drain()
        pipe.close()


async def _read(
    process: asyncio.subprocess.Process, stream: asyncio.StreamReader, most: int
) -> bytes:
    kept = b""
    while len(kept) <= most and (part := await stream.read(most + 1 - len(kept))):
        kept += part
    if len(kept) > most:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        # a program that waits on a full pipe never ends, so the rest is read and thrown away
        while await stream.read(1 << 16):
            pass
    return kept


def _ended(said: dict[str, Any], output: bytes, errors: bytes, limits: Limits) -> Ended:
    if "refused" in said:
        raise JobError(
            f"code under test cannot be confined here: {said['refused']}; where you know what it "
            "does, `sandbox: unconfined` of `code_tests` or `bash` runs it all the same"
        )
    message = errors.decode(errors="replace")
    if not said:
        raise JobError(f"the sandbox broke: {message.strip()[-300:] or 'it did not say why'}")
    code, isolated = int(said.get("code", -signal.SIGKILL)), bool(said.get("isolated"))
    how: How
    if max(len(output), len(errors)) > limits.output:
        how = "output"
    elif said.get("much"):
        how = "memory"
    elif said.get("late") or code == -signal.SIGXCPU:
        how = "timeout"
    elif code < 0:
        how = "crash"
    else:
        how = "done" if code == 0 else _by_its_words(message, isolated=isolated)
    kept = output[: limits.output].decode(errors="replace")
    return Ended(how, code, kept, message[-limits.output :], isolated=isolated)


def _by_its_words(errors: str, *, isolated: bool) -> How:
    # Several processes may write at once: what names the error is in the last whole traceback.
    lines = [line for line in errors.splitlines() if line.strip() and not _FRAME.match(line)]
    last = lines[-1] if lines else ""
    if not isolated and "socket" in errors and _NO_SOCKET.search(last):
        return "network"
    for how, pattern in _SAID.items():
        if re.search(pattern, last):
            return how
    return "error"
