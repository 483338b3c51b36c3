"""vLLM in this process: its asynchronous engine, whose workers are processes of its own."""

import asyncio
import os
import threading
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

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

_starting = threading.Lock()


class Inside:
    """vLLM's AsyncLLM; it belongs to the event loop that it is started in."""

    max_length: int

    def __init__(self, settings: Settings, *, dtype: str) -> None:
        self._settings, self._dtype = settings, dtype
        self._llm: Any = None

    async def start(self, folder: Path) -> None:
        """Start; the loop stands still meanwhile. Raises JobError when it does not start."""
        with _variables(environment(self._settings)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's own, and of what it imports
            from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
            from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

            try:
                made = AsyncEngineArgs(**arguments(folder, self._settings, dtype=self._dtype))
                self._llm = AsyncLLM.from_engine_args(made)
            except Exception as error:
                message = f"{type(error).__name__}: {_line(error)}"
                raise JobError(f"vLLM did not start: {message}") from error
        self.max_length = int(self._llm.model_config.max_model_len)

    async def sample(
        self, asked: PendingRequest, prompt_ids: Sequence[int], sampling: Sampling
    ) -> PartialOutput:
        """Sample behind a prompt."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        params = SamplingParams(
            **sampling_params(sampling, is_heard=asked.heard is not None),
            output_kind=RequestOutputKind.DELTA,
            flat_logprobs=True,
        )
        tokens: list[int] = []
        logprobs: list[float] = []
        first, output = 0.0, None
        async with self._refusals():
            async for one in self._llm.generate(_prompt(prompt_ids), params, asked.name):
                output = one.outputs[0]
                first = first or perf_counter()
                tokens += output.token_ids
                asked.tell(list(output.token_ids))
                if output.token_ids and output.logprobs is not None:
                    logprobs += _sampled(output.logprobs)[-len(output.token_ids) :]
                if asked.is_ended and output.finish_reason is None:
                    await self._llm.abort(asked.name)  # it may have been told too early
        assert output is not None, "vLLM answers each request"
        spans = [(span.version, span.end - span.start) for span in output.weight_versions or ()]
        return PartialOutput(tokens, logprobs, output.finish_reason or "abort", spans, first)

    async def score(self, name: str, token_ids: Sequence[int]) -> list[float] | None:
        """Score a prompt's tokens."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        params = SamplingParams(**scoring_params(), output_kind=RequestOutputKind.FINAL_ONLY)
        async with self._refusals():
            [output] = [o async for o in self._llm.generate(_prompt(token_ids), params, name)]
        if output.outputs[0].finish_reason == "abort":
            return None
        message = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [float(found[token].logprob) for token, found in message]

    async def abort(self, asked: Sequence[PendingRequest]) -> None:
        """End requests."""
        await self._llm.abort([one.name for one in asked])

    async def pause(self) -> None:
        """End all requests."""
        await self._told(self._llm.pause_generation(mode="abort", clear_cache=True))

    async def resume(self) -> None:
        """Go on."""
        await self._told(self._llm.resume_generation())

    async def call(self, method: str, *arguments: str) -> list[Any]:
        """Call a method in each worker."""
        return list(await self._told(self._llm.collective_rpc(method, args=arguments)))

    async def label(self, label: str) -> None:
        """Label what is sampled from now on."""
        await self._told(self._llm.update_weight_version(label))

    async def stop(self) -> None:
        """End vLLM's processes."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown, timeout=5.0)

    @asynccontextmanager
    async def _refusals(self) -> AsyncGenerator[None]:
        """Tell a request that vLLM refuses, PolicyError, from the end of vLLM, DiedError."""
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {_line(error)}"
            if self._llm is None or self._llm.errored:
                raise DiedError(f"vLLM's engine died: {message}") from error
            raise PolicyError(f"vLLM refused a request: {message}") from error

    async def _told(self, question: Any) -> Any:
        """Await what vLLM's engine is told; whatever it does not do, it is no longer known by."""
        try:
            async with asyncio.timeout(self._settings.startup_timeout):
                return await question
        except Exception as error:
            told = f"{type(error).__name__}: {_line(error)}"
            raise DiedError(f"vLLM's engine failed: {told}") from error


def _prompt(token_ids: Sequence[int]) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": list(token_ids)}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _sampled(logprobs: Any) -> list[float]:
    """Return the log-probs of the sampled tokens, the first of each position."""
    return [float(logprobs.logprobs[start]) for start in logprobs.start_indices]


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for the processes that are started in the block."""
    with _starting:
        os.environ.update(values)
        try:
            yield
        finally:
            for name in values:
                os.environ.pop(name, None)
