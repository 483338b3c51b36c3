"""vLLM's asynchronous engine: a client here, scheduler and model in processes of their own.

There is no HTTP server as a second way: the model is in another process in either case, and
AsyncLLM offers sleep, wake-up and weight transfer (IPC, NCCL) as methods.
"""

import asyncio
import os
import socket
import threading
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

from ....store.errors import JobError, message_of
from ...config.engines import VllmEngine as Settings
from ...config.model import RopeParameters
from ..engine import Request
from ..policy import PolicyError, Sampling
from ..token_stream import TokenCallback
from .arguments import arguments, environment
from .prompts import prompt_of
from .worker_adapter import ADAPTER

_starting = threading.Lock()


class DiedError(JobError):
    """vLLM is gone, or in an unknown state."""


@dataclass(eq=False)
class PendingRequest:
    """A request under way; vLLM sees it once, and again after each change of weights."""

    request: Request
    is_ended: bool = False
    """Whether it is to be answered with the tokens so far."""
    on_tokens: TokenCallback | None = None
    """Receives the next tokens as they are sampled; None: they are not streamed."""
    name: str = field(default_factory=lambda: uuid4().hex)

    def stream(self, token_ids: Sequence[int]) -> None:
        """Pass tokens on, if they are streamed."""
        if token_ids and self.on_tokens is not None:
            self.on_tokens(token_ids)


@dataclass(frozen=True)
class PartialOutput:
    """The tokens of a request until it ended or the weights changed."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    """stop, length or abort."""
    spans: Sequence[tuple[str, int]]
    """Labels of weights with the number of tokens they sampled, as vLLM's scheduler reports."""
    first_token: float
    """Time of the first token, by perf_counter."""
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()
    """The likeliest tokens at each place, if they were requested."""


class Backend:
    """A running vLLM (AsyncLLM), bound to the event loop in which it is started.

    All methods raise DiedError once it no longer runs.
    """

    max_length: int
    """Most tokens of prompt and answer together."""
    is_asleep = False
    """Whether it has given its memory back."""

    def __init__(
        self,
        settings: Settings,
        *,
        dtype: str,
        adapter: Mapping[str, Any] | None = None,
        rope: RopeParameters | None = None,
    ) -> None:
        """`adapter`: peft's settings of the adapter with which all requests are answered."""
        self._settings, self._dtype, self._adapter = settings, dtype, adapter
        self._rope = rope
        self._llm: Any = None

    async def start(self, folder: Path, *, has_weights: bool = True) -> None:
        """Start with the model of a folder, blocking the loop; without weights, with random ones.

        Raises JobError if it fails.
        """
        with _variables(environment(self._settings)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # raised by vLLM and what it imports
            from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
            from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

            try:
                own = {"adapter": self._adapter, "rope": self._rope}
                given = arguments(folder, self._settings, dtype=self._dtype, **own)
                given |= dict[str, Any]() if has_weights else {"load_format": "dummy"}
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
            except Exception as error:
                raise JobError(f"vLLM did not start: {_line(error)}") from error
            from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        # The path is never read: the workers have the adapter before a request needs it.
        lora = LoRARequest("policy", ADAPTER, "in memory")
        self._lora = lora if self._adapter is not None else None
        self.max_length = int(self._llm.model_config.max_model_len)
        await self.call("end_with", socket.gethostname(), os.getpid())

    async def sample(
        self, asked: PendingRequest, prompt: Mapping[str, Any], sampling: Sampling
    ) -> PartialOutput:
        """Continue a prompt until the end of the answer, or until the request is aborted."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # pyright: ignore[reportMissingImports]

        grammar = asked.request.grammar
        form = None if grammar is None else StructuredOutputsParams(structural_tag=grammar)
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            # Text is made from the tokens later; vLLM needs it only to find stop texts.
            detokenize=bool(sampling.stop),
            # Beside the log-prob of the sampled one, which is always there.
            logprobs=sampling.top_logprobs,
            structured_outputs=form,
            # Without streaming only the first and the last tokens are worth a message.
            stream_interval=1 if asked.on_tokens is not None else 1 << 20,
            output_kind=RequestOutputKind.DELTA,
            flat_logprobs=True,
        )
        tokens: list[int] = []
        logprobs: list[float] = []
        top: list[list[tuple[int, float]]] = []
        first, output = 0.0, None
        async with self._request():
            async for one in self._llm.generate(
                prompt, params, asked.name, lora_request=self._lora
            ):
                output = one.outputs[0]
                first = first or perf_counter()
                tokens += output.token_ids
                asked.stream(list(output.token_ids))
                if output.token_ids and output.logprobs is not None:
                    logprobs += _sampled(output.logprobs)[-len(output.token_ids) :]
                    if sampling.top_logprobs:
                        found = _likeliest(output.logprobs, sampling.top_logprobs)
                        top += found[-len(output.token_ids) :]
                if asked.is_ended and output.finish_reason is None:
                    # Again: an abort that arrives before its request is ignored.
                    await self._llm.abort(asked.name)
        assert output is not None, "vLLM answers each request"
        spans = [(span.version, span.end - span.start) for span in output.weight_versions or ()]
        reason = output.finish_reason or "abort"
        return PartialOutput(tokens, logprobs, reason, spans, first, top)

    async def score(self, name: str, token_ids: Sequence[int]) -> list[float] | None:
        """Return the log-prob of each token but the first; None if the request was aborted."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        params = SamplingParams(
            max_tokens=1,  # vLLM always samples one
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async with self._request():
            prompt = prompt_of(token_ids)
            found = self._llm.generate(prompt, params, name, lora_request=self._lora)
            [output] = [one async for one in found]
        if output.outputs[0].finish_reason == "abort":
            return None
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [float(found[token].logprob) for token, found in pairs]

    async def abort(self, asked: Sequence[PendingRequest]) -> None:
        """End requests: `sample` returns the tokens so far."""
        await self._llm.abort([one.name for one in asked])

    async def pause(self) -> None:
        """End all requests, clear the KV cache, and start no others until `resume`."""
        await self._command(self._llm.pause_generation(mode="abort", clear_cache=True))

    async def resume(self) -> None:
        """Start requests again."""
        await self._command(self._llm.resume_generation())

    async def sleep(self) -> None:
        """End all requests, move the weights to CPU memory and drop the KV cache."""
        await self._command(self._llm.sleep(level=1, mode="abort"))
        self.is_asleep = True

    async def wake_up(self) -> None:
        """Load the weights again and start requests."""
        await self._command(self._llm.wake_up())
        self.is_asleep = False

    async def call(self, method: str, *arguments: str | int) -> list[Any]:
        """Call a method of `Worker` in each worker, and return the results."""
        return list(await self._command(self._llm.collective_rpc(method, args=arguments)))

    async def label(self, label: str) -> None:
        """Label the tokens that are sampled from now on."""
        await self._command(self._llm.update_weight_version(label))

    async def stop(self) -> None:
        """End vLLM's processes."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown, timeout=5.0)
            # vLLM closes its sockets but not their ZeroMQ context, which has two threads.
            llm.engine_core.resources.ctx.destroy(linger=0)

    @asynccontextmanager
    async def _request(self) -> AsyncGenerator[None]:
        """Raise PolicyError for a request that vLLM refuses, and DiedError if vLLM is gone."""
        try:
            yield
        except Exception as error:
            if self._llm is None or self._llm.errored:
                raise DiedError(f"vLLM's engine died: {_line(error)}") from error
            raise PolicyError(f"vLLM refused a request: {_line(error)}") from error

    async def _command(self, command: Any) -> Any:
        """Await a command to vLLM, within the start-up time.

        After a failure its state is unknown, so that only a new start helps: DiedError.
        """
        try:
            async with asyncio.timeout(self._settings.startup_timeout):
                return await command
        except Exception as error:
            raise DiedError(f"vLLM's engine failed: {_line(error)}") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {message_of(error, 500)}"


def _sampled(logprobs: Any) -> list[float]:
    """Return the log-probs of the sampled tokens, the first of each position."""
    return [float(logprobs.logprobs[start]) for start in logprobs.start_indices]


def _likeliest(logprobs: Any, number: int) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens of each position, which follow the sampled one."""
    made = []
    for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        places = range(start + 1, min(end, start + 1 + number))
        made.append([(int(logprobs.token_ids[i]), float(logprobs.logprobs[i])) for i in places])
    return made


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started in the block."""
    # The environment is one for all threads: a start at the same time would inherit these too.
    with _starting:
        os.environ.update(values)
        try:
            yield
        finally:
            for name in values:
                os.environ.pop(name, None)
