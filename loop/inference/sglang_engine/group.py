"""Weights that come in memory, broadcast to one SGLang server by torch's process groups."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch

from ....store.errors import ConfigError, JobError
from ...config.engines import SglangEngine as Settings
from ...runs.own_address import own_address
from ..shared_tensors import SharedBlock
from .failures import AGAIN_SECONDS, LostError

PART_BYTES = 256 << 20
"""A part of the weights ends with the tensor that exceeds this; a server has room for one more."""
LEAVE_SECONDS = 2.0
"""Longest wait for a server to forget a group."""

Post = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


class WeightGroup:
    """The processes of a server and one of ours, which has rank 0 and broadcasts.

    A process of its own: gloo may end it by SIGSEGV when a member is killed while they connect,
    and killing it ends a broadcast that waits for a server which is gone.
    """

    def __init__(self, url: str, name: str, settings: Settings, post: Post) -> None:
        """`post` sends a request to the server at the URL, whose `name` is for messages."""
        self._url, self._server, self._settings, self._post = url, name, settings, post
        self._process: Process | None = None
        self._name = ""
        self._size = 1
        self._refused: str | None = None

    def look_at(self, info: Mapping[str, Any]) -> None:
        """Read the processes of a server from what it says of itself.

        Raises ConfigError if this process has no GPU for NCCL.
        """
        if self._settings.broadcast_backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError(
                "`broadcast_backend` is nccl, and this process has no GPU; set it to gloo"
            )
        self._size = int(info.get("tp_size", 1))
        several = (
            f"`{key}` is {info[key]}" for key in ("dp_size", "pp_size") if info.get(key, 1) > 1
        )
        self._refused = next(several, None)

    async def update(self, block: SharedBlock, label: str) -> None:
        """Replace the weights of a server that is paused.

        Raises JobError if it refuses them, and LostError if they do not arrive; then it may have
        some of them.
        """
        if self._refused is not None:
            raise JobError(
                f"weights cannot be broadcast to the server `{self._server}`, whose "
                f"{self._refused}; start it with 1, or set `schedule.weight_transport: store`"
            )
        await self._begin()
        try:
            await self._sent(block, label)
        except BaseException as error:
            await self._end()
            if not isinstance(error, LostError):
                await self._post("/end_weight_update", {})
            raise
        await self._post("/end_weight_update", {})

    async def leave(self) -> None:
        """End our process; the server forgets the group, unless it is gone or was restarted."""
        if self._process is not None:
            with suppress(JobError, ConfigError, TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    body = {"group_name": self._name}
                    await self._post("/destroy_weights_update_group", body)
            await self._end()

    async def _begin(self) -> None:
        try:
            await self._post("/begin_weight_update", {})
        except LostError:
            raise
        except JobError:
            # Another process that was killed may have begun one.
            await self._post("/end_weight_update", {})
            await self._post("/begin_weight_update", {})

    async def _sent(self, block: SharedBlock, label: str) -> None:
        is_new = self._process is None
        try:
            await self._send(block, label)
        except LostError:
            raise
        except JobError:
            # A server that was restarted does not know the group any more.
            if is_new:
                raise
            await self._end()
            await self._send(block, label)

    async def _send(self, block: SharedBlock, label: str) -> None:
        process = self._process or await self._formed()
        parts = list(_parts(block.source["tensors"]))
        for number, part in enumerate(parts, 1):
            names, dtypes, shapes = zip(*part, strict=True)
            is_last = number == len(parts)
            body = {
                "names": names,
                "dtypes": dtypes,
                "shapes": shapes,
                "group_name": self._name,
                "flush_cache": is_last,
                "weight_version": label if is_last else None,
            }
            asked = json.dumps({"source": block.source, "names": names}) + "\n"
            assert process.stdin is not None
            process.stdin.write(asked.encode())
            await self._both(process, "/update_weights_from_distributed", body)

    async def _formed(self) -> Process:
        """Start our process, and form the group with the server."""
        backend, name = self._settings.broadcast_backend, f"rlake-{uuid4().hex}"
        there = urlsplit(self._url).hostname or ""
        try:
            host = await asyncio.to_thread(own_address, there)
        except OSError as error:
            raise LostError(f"no way to the server `{self._server}`: {error}") from error
        size = 1 + self._size
        terms = {"host": host, "backend": backend, "size": size, "group": name}
        terms |= {"seconds": self._settings.request_timeout}
        # `python -m` finds rlake where this process found it.
        paths = os.pathsep.join(path for path in sys.path if path)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"{__package__}.sender", json.dumps(terms)),
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "PYTHONPATH": paths, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            start_new_session=True,  # not ended by Ctrl-C, which ends a run in order
        )
        self._process, self._name = process, name
        port = (await self._said(process))["port"]
        body = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size}
        await self._both(
            process, "/init_weights_update_group", {**body, "group_name": name, "backend": backend}
        )
        return process

    async def _both(self, process: Process, path: str, body: Mapping[str, Any]) -> None:
        """Send a request, and wait until the server and our process have done their parts."""
        asked = asyncio.ensure_future(self._post(path, body))
        said = asyncio.create_task(self._said(process))
        try:
            await asyncio.wait([asked, said], return_when=asyncio.FIRST_EXCEPTION)
            if not said.done():  # the server says no, because of us or of the weights
                await asyncio.wait([said], timeout=AGAIN_SECONDS)
            if said.done():
                said.result()
            await asked
        finally:
            for task in (asked, said):
                task.cancel()
            await asyncio.gather(asked, said, return_exceptions=True)

    async def _said(self, process: Process) -> dict[str, Any]:
        """Return what our process says next. Raises LostError if that is an error, or nothing."""
        assert process.stdout is not None
        seconds = self._settings.request_timeout
        try:
            async with asyncio.timeout(seconds):
                line = await process.stdout.readline()
        except TimeoutError:
            raise self._lost(f"it did not happen in {seconds:g} s (`request_timeout`)") from None
        if not line:
            raise self._lost(f"our process ended with exit code {await process.wait()}")
        if "error" in (found := json.loads(line)):
            raise self._lost(found["error"])
        return found

    def _lost(self, why: str) -> LostError:
        return LostError(f"the server `{self._server}` did not receive weights: {why}")

    async def _end(self) -> None:
        if (process := self._process) is None:
            return
        self._process = None
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _parts(tensors: Sequence[Sequence[Any]]) -> Iterator[list[tuple[str, str, list[int]]]]:
    """Cut the tensors of a block into parts, which are sent one after the other."""
    part: list[tuple[str, str, list[int]]] = []
    first = 0
    ends = [start for *_, start in tensors[1:]]
    for (name, dtype, shape, _), end in zip(tensors, [*ends, None], strict=True):
        part.append((name, dtype, shape))
        if end is None or end - first >= PART_BYTES:
            yield part
            part, first = [], end or 0
