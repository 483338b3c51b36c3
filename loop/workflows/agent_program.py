"""Run an agent that is a program of its own: in another environment, or in another language."""

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from ...store.errors import ConfigError, JobError
from ...store.records import Experience, Task
from ..chat_api.recording import record
from ..inference.policy import Policy
from .agent import answered

_LONGEST = 1 << 20
"""Most bytes of a program's output, and of its errors."""
_END_SECONDS = 2.0
"""How long output is still read when the program has ended and something that it has started, in a
session of its own, holds its pipes open; and how long a killed program may take to end."""
_BUFFER = 1 << 16


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
    What it has started ends with it, and is not waited for.
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
        # the policy's replace those of the user, whose key is for another server
        program = await _start(command, {**os.environ, **api, **(environment or {})})
        try:
            output, errors = await program.communicate((task.prompt_text or "").encode())
        finally:
            await program.end()
        # first: a program that was ended for its output has a status too
        if max(len(output), len(errors)) > _LONGEST:
            raise JobError(f"`{command[0]}` prints more than 1 MB; print the answer alone")
        if program.process.returncode != 0:
            last = errors.decode(errors="replace").strip()[-500:] or "it did not say why"
            raise JobError(f"`{command[0]}` ended with status {program.process.returncode}: {last}")
        return answered(session.rows(), output.decode(errors="replace").strip() or None)


class _Exit(SubprocessStreamProtocol):
    """Knows when the program has ended, for which `Process.wait` waits until its pipes close."""

    def __init__(self) -> None:
        super().__init__(limit=_BUFFER, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


@dataclass
class _Program:
    process: Process
    transport: asyncio.SubprocessTransport
    exited: asyncio.Event

    async def communicate(self, request: bytes) -> tuple[bytes, bytes]:
        """Write to its input; return its output and its errors."""
        output, errors = bytearray(), bytearray()
        # while it prints: one that prints much before it reads would wait for us, and we for it
        writing = asyncio.create_task(self._write(request))
        reading = asyncio.gather(
            self._read(self.process.stdout, output), self._read(self.process.stderr, errors)
        )
        try:
            await self.exited.wait()
            self._kill()  # what it left in its session
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await reading
        finally:
            writing.cancel()
            reading.cancel()
        return bytes(output), bytes(errors)

    async def end(self) -> None:
        """Kill it with what it has started, and close its pipes, which others may hold."""
        self._kill()
        self.transport.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self.exited.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _write(self, request: bytes) -> None:
        assert self.process.stdin is not None, "it was started with pipes"
        with suppress(ConnectionError):  # it may not read
            self.process.stdin.write(request)
            await self.process.stdin.drain()
        self.process.stdin.close()

    async def _read(self, stream: asyncio.StreamReader | None, kept: bytearray) -> None:
        """Keep what it prints; one that prints too much is ended."""
        assert stream is not None, "it was started with pipes"
        while part := await stream.read(_BUFFER):
            # it is read on to its end, or the program would block before it can be ended
            if len(kept) > _LONGEST:
                self._kill()
            else:
                kept += part


async def _start(command: list[str], environment: dict[str, str]) -> _Program:
    transport, protocol = await asyncio.get_running_loop().subprocess_exec(
        _Exit,
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=environment,
        start_new_session=True,  # so that what it has started ends with it
    )
    process = Process(transport, protocol, asyncio.get_running_loop())
    return _Program(process, transport, protocol.exited)
