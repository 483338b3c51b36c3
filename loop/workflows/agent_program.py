"""Run an agent that is a program of its own: in another environment, or in another language."""

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Annotated

from pydantic import AfterValidator

from ...store.errors import ConfigError, JobError
from ...store.records import Experience, Task
from ..chat_api.recording import record
from ..inference.policy import Policy
from .agent import answered

_LONGEST = 1 << 20
"""Most bytes of a program's output, and of its errors."""
_END_SECONDS = 5.0
"""How long a killed program may take to end."""


def _known(command: list[str]) -> list[str]:
    """Check, before any work, that the program exists; `python` is the one that runs rlake."""
    if not command:
        raise ConfigError("`command` is empty; expected a program and its arguments")
    found = sys.executable if command[0] == "python" else shutil.which(command[0])
    if found is None:
        raise ConfigError(f"no program `{command[0]}`; write its path, or install it")
    return [found, *command[1:]]


async def agent_program(
    task: Task,
    policy: Policy,
    *,
    command: Annotated[list[str], AfterValidator(_known)],
    environment: dict[str, str] | None = None,
    heeds: list[str] | None = None,
) -> list[Experience]:
    """Run a program on a task; its requests to the policy are trained on.

    The program finds the policy in its environment, as OpenAI's clients do by themselves:
    `OPENAI_BASE_URL`, `OPENAI_API_KEY`, and the model's name in `OPENAI_MODEL`. It reads the last
    user message from its standard input. What it prints is its answer, which the run's rewards
    judge; if it prints nothing, the last answer of the policy is judged. `python` as the first word
    of `command` is the one that runs rlake; `environment` adds variables. `heeds` is as in `agent`.
    Raises JobError if the program fails, with the end of its errors, or prints more than 1 MB.
    """
    # without `heeds`, those that are the default of `record`
    given = {} if heeds is None else {"heeds": heeds}
    async with record(policy, task, **given) as session:
        api = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": session.model,
        }
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            # the policy's replace those of the user, whose key is for another server
            env={**os.environ, **api, **(environment or {})},
            start_new_session=True,  # so that what it has started ends with it
        )
        try:
            output, errors = await _talk(process, (task.prompt_text or "").encode())
        finally:
            await _ended(process)
        # first: a program that was ended for its output has a status too
        if max(len(output), len(errors)) > _LONGEST:
            raise JobError(f"`{command[0]}` prints more than 1 MB; print the answer alone")
        if process.returncode != 0:
            last = errors.decode(errors="replace").strip()[-500:] or "it did not say why"
            raise JobError(f"`{command[0]}` ended with status {process.returncode}: {last}")
        return answered(session.rows(), output.decode(errors="replace").strip() or None)


async def _talk(process: Process, said: bytes) -> tuple[bytes, bytes]:
    reads = (_read(process, stream) for stream in (process.stdout, process.stderr))
    # while it prints: a program that prints much before it reads would wait for us, and we for it
    writing = asyncio.create_task(_write(process, said))
    try:
        output, errors = await asyncio.gather(*reads)
        await writing
    finally:
        writing.cancel()
    await process.wait()
    return output, errors


async def _write(process: Process, said: bytes) -> None:
    assert process.stdin is not None, "it was started with pipes"
    with suppress(ConnectionError):  # it may not read
        process.stdin.write(said)
        await process.stdin.drain()
    process.stdin.close()


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _ended(process: Process) -> None:
    """Kill the program with what it started. `wait` returns only when its pipes are empty."""
    _kill(process)
    with suppress(TimeoutError):  # of a pipe that something outside of its session still holds
        async with asyncio.timeout(_END_SECONDS):
            for stream in (process.stdout, process.stderr):
                while stream is not None and await stream.read(1 << 16):
                    pass
            await process.wait()


async def _read(process: Process, stream: asyncio.StreamReader | None) -> bytes:
    """Return what it prints; one that prints too much is ended."""
    assert stream is not None, "it was started with pipes"
    kept = b""
    while part := await stream.read(1 << 16):
        # it is read on to its end, or the program would block before it can be ended
        if len(kept) > _LONGEST:
            _kill(process)
        else:
            kept += part
    return kept
