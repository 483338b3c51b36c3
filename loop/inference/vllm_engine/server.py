"""vLLM as a server of its own, a process that is asked over HTTP by token ids.

It listens at a socket in a folder that only this user can read, never at a port: whoever reaches
it can replace its weights.
"""

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import httpx

from ....store.errors import JobError
from ...config.engines import VllmEngine as Settings
from ..policy import PolicyError, Sampling
from .backend import (
    DiedError,
    PartialOutput,
    PendingRequest,
    arguments,
    environment,
    sampling_params,
    scoring_params,
)

STOP_SECONDS = 5.0
"""How long the server may take to end by itself."""
CONNECT_SECONDS = 10.0
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Made once: to make it takes as long as all else of a client."""
POLL_SECONDS = 0.05
TAIL_LINES = 15
"""Lines of the server's log that an error shows."""


class Server:
    """A server that is started, asked, and ended by us."""

    max_length: int

    def __init__(self, settings: Settings, *, dtype: str) -> None:
        self._settings, self._dtype = settings, dtype
        self._place = TemporaryDirectory(prefix="rlake-vllm-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process, which leads the group of its workers."""
        return self._process.pid if self._process else None

    async def start(self, folder: Path) -> None:
        """Start the server and wait until it answers; JobError with its last words if not."""
        made = arguments(folder, self._settings, dtype=self._dtype)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rlake.loop.inference.vllm_engine.auxiliary",
                    *_command(made, self._socket),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment(self._settings), "VLLM_SERVER_DEV_MODE": "1"},
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(self._settings.startup_timeout):
                while not await self._is_up():
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise JobError(
                f"vLLM's server did not answer in {self._settings.startup_timeout:g} "
                f"s:\n{self._tail}"
            ) from None
        [model] = (await self._get("/v1/models"))["data"]
        self.max_length = int(model["max_model_len"])

    async def sample(
        self, asked: PendingRequest, prompt_ids: Sequence[int], sampling: Sampling
    ) -> PartialOutput:
        """Sample behind a prompt."""
        body = {
            "request_id": asked.name,
            "token_ids": list(prompt_ids),
            "sampling_params": sampling_params(sampling, is_heard=asked.heard is not None),
            "stream": True,
        }
        tokens: list[int] = []
        logprobs: list[float] = []
        spans: list[tuple[str, int]] = []
        first, reason = 0.0, None
        async with aclosing(self._choices(body)) as choices:
            async for choice in choices:
                first = first or perf_counter()
                new = choice.get("token_ids") or []
                tokens += new
                asked.tell(new)
                logprobs += [
                    at["logprob"] for at in (choice.get("logprobs") or {}).get("content") or ()
                ]
                reason = choice.get("finish_reason")
                spans += [
                    (span["version"], span["end"] - span["start"])
                    for span in choice.get("weight_versions") or ()
                ]
                if asked.is_ended and reason is None:
                    await self.abort([asked])  # it may have been told too early
        if reason is None:
            raise self._died("its answer broke off")
        return PartialOutput(tokens, logprobs, reason, spans, first)

    async def score(self, name: str, token_ids: Sequence[int]) -> list[float] | None:
        """Score a prompt's tokens."""
        body = {
            "request_id": name,
            "token_ids": list(token_ids),
            "sampling_params": scoring_params(),
        }
        async with self._asking(body) as answer:
            message = json.loads(await answer.aread())
        if message["choices"][0]["finish_reason"] == "abort":
            return None
        found = zip(token_ids[1:], message["prompt_logprobs"][1:], strict=True)
        return [float(at[str(token)]["logprob"]) for token, at in found]

    async def abort(self, asked: Sequence[PendingRequest]) -> None:
        """End requests."""
        names = [f"generate-tokens-{one.name}" for one in asked]
        await self._post("/inference/v1/abort_requests", {"request_ids": names})

    async def pause(self) -> None:
        """End all requests."""
        await self._post("/pause?mode=abort&clear_cache=true")

    async def resume(self) -> None:
        """Go on."""
        await self._post("/resume")

    async def call(self, method: str, *arguments: str) -> list[Any]:
        """Call a method in each worker."""
        body = {"method": method, "args": list(arguments)}
        return list((await self._post("/collective_rpc", body))["results"])

    async def label(self, label: str) -> None:
        """Label what is sampled from now on."""
        await self._post("/update_weight_version", {"new_version": label})

    async def stop(self) -> None:
        """End the server and its workers."""
        if (process := self._process) is not None:
            process.terminate()
            await asyncio.to_thread(_end, process)
        self._place.cleanup()

    @property
    def folder(self) -> Path:
        """Where its socket and its log are; it is gone when the server is stopped."""
        return Path(self._place.name)

    @property
    def _socket(self) -> Path:
        return self.folder / "vllm.sock"

    @property
    def _log(self) -> Path:
        return self.folder / "vllm.log"

    @property
    def _tail(self) -> str:
        """The last words of the server's log."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.is_file() else []
        return "\n".join(line[:500] for line in lines[-TAIL_LINES:])

    def _died(self, why: str) -> DiedError:
        return DiedError(f"vLLM's server died: {why}; the end of its log:\n{self._tail}")

    def _http(self, seconds: float | None = None) -> httpx.AsyncClient:
        """Return a client for one request, which has its connection to itself.

        Of connections that are shared some would stay open when who tidies them up is cancelled.
        """
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self._socket), verify=_NO_TLS),
            base_url="http://vllm",
            timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS),
            trust_env=False,
        )

    async def _is_up(self) -> bool:
        assert self._process is not None, "it was started"
        if (code := self._process.poll()) is not None:
            raise JobError(f"vLLM's server did not start, it ended with {code}:\n{self._tail}")
        try:
            async with self._http() as http:
                return (await http.get("/health")).is_success
        except httpx.TransportError:
            return False

    async def _get(self, path: str) -> Any:
        try:
            async with self._http() as http:
                return (await http.get(path)).raise_for_status().json()
        except JobError:
            raise
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            raise self._died(f"{path}: {type(error).__name__} {error}") from error

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Tell the server something, bounded in time; what it does not do, leaves it unknown."""
        try:
            async with self._http(self._settings.startup_timeout) as http:
                answer = (await http.post(path, json=body or {})).raise_for_status()
            return answer.json() if answer.content else None
        except JobError:
            raise
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            raise self._died(f"{path}: {type(error).__name__} {error}") from error

    async def _choices(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        """Ask for tokens, and yield the parts of the answer as they come."""
        async with self._asking(body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or "[DONE]" in line:
                    continue
                part = json.loads(line.removeprefix("data:"))
                if "choices" not in part:
                    raise self._died(f"it answered {line[:500]}")
                for choice in part["choices"]:
                    yield choice

    @asynccontextmanager
    async def _asking(self, body: Mapping[str, Any]) -> AsyncGenerator[httpx.Response]:
        """Ask for tokens; what is not an answer is PolicyError, or DiedError, to the end of it."""
        try:
            async with (
                self._http() as http,
                http.stream("POST", "/inference/v1/generate", json=body) as answer,
            ):
                if answer.status_code != 200:
                    said = (await answer.aread()).decode(errors="replace")[:500]
                    message = f"it answered {answer.status_code}: {said}"
                    if answer.is_client_error:
                        raise PolicyError(f"vLLM refused a request: {message}")
                    raise self._died(message)
                yield answer
        except JobError:
            raise
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            raise self._died(f"{type(error).__name__} {error}") from error


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a process that was told to end, and kill what is left of its group."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _command(made: dict[str, Any], socket: Path) -> list[str]:
    """Return vLLM's arguments as a command line, with what makes it a server of ours."""
    options = made | {
        "uds": str(socket),
        "enable_scale_out": True,  # answers token ids with token ids
        "disable_uvicorn_access_log": True,
    }
    return [part for name, value in options.items() for part in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    """Return an argument as it stands on a command line.

    >>> _flag("max_num_seqs", 8), _flag("enforce_eager", False), _flag("hf_overrides", {"a": 1})
    (['--max-num-seqs', '8'], ['--no-enforce-eager'], ['--hf-overrides', '{"a": 1}'])
    """
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else [flag.replace("--", "--no-", 1)]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]
