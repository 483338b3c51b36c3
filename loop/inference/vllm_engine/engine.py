"""The engine that samples with vLLM."""

import asyncio
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ....store.errors import ConfigError, JobError, missing_extra
from ....store.ids import content_id
from ...config import FrozenModel
from ...config.engines import VllmEngine as Settings
from ...models.chat_template import set_template
from ...models.images import Images
from ...models.weights import Weights
from ..engine import Request, Sampled
from ..event_loop import BackgroundLoop, all_of
from ..incoming_weights import IncomingWeights, WeightSource
from ..policy import PolicyError
from ..shared_tensors import SharedBlock
from .arguments import check_dtype, check_heads
from .backend import Backend, DiedError, PendingRequest
from .output import Answer, is_sane
from .prompts import prompt_of
from .update import is_verified, update

GRACE_SECONDS = 30.0
"""Extra wait for a start beyond its timeout, in which vLLM ends it and reports why."""
ENDING_SECONDS = 2.0
"""Time for requests under way to be answered when the engine is closed."""

_log = logging.getLogger(__name__)


class VllmEngine:
    """vLLM, with weights that are replaced while it runs.

    For new weights all requests are stopped between two tokens. They continue with the tokens they
    have and a KV cache computed anew, because keys and values of the old weights would make
    log-probs that no set of weights has. vLLM's own scheduler labels each step with the weights
    that sampled it. Weights are identified by the digest of the tensors that the workers load; the
    workers then compare what the model multiplies with to these tensors (`verified`). Weights in
    memory reach the workers through shared memory; an adapter is added to its base model.

    When vLLM dies, requests under way end with PolicyError, and it is started again with the
    newest weights for the next request, at most `max_restarts` times.
    """

    name = "vllm"

    def __init__(
        self,
        folder: Path,
        settings: Settings | None = None,
        *,
        dtype: str = "float32",
        model: FrozenModel | None = None,
        images: Images | None = None,
    ) -> None:
        """Start vLLM with the model of a folder. Raises JobError if it does not start.

        `model` has the chat template, the scaling of positions, and whether code of the model is
        run; `images` are those that its prompts may show.
        """
        if find_spec("vllm") is None:
            raise missing_extra("vllm", "vllm")
        check_dtype(dtype)
        self._settings, self._dtype = settings or Settings(), dtype
        self._rope = None if model is None else model.rope_parameters
        self._images = images
        trust = model is not None and model.trust_remote_code
        if trust:
            own = {"trust_remote_code": True, **self._settings.engine_args}
            self._settings = self._settings.model_copy(update={"engine_args": own})
        check_heads(FrozenModel(path=str(folder)), self._settings)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust)
        if model is not None:
            set_template(tokenizer, model)
        self.tokenizer: PreTrainedTokenizerFast = tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        self.verified: tuple[int, int] = (0, 0)
        """Number of tensors loaded last, and of those compared with what the model holds."""
        self.restarts = 0
        """Number of restarts so far."""
        self.max_length: int | None = None
        self._asked: dict[int, PendingRequest] = {}
        merge = self._settings.merge_adapter
        self._source = WeightSource(folder, dtype=dtype, merge_adapter=merge)
        self._served = self._source.start()
        self._block, self._updates = SharedBlock(), 0
        self._backend: Backend | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._own = BackgroundLoop("vllm")
        longest = self._settings.startup_timeout
        try:
            self._own.submit(self._start()).result(longest + GRACE_SECONDS)
        except BaseException as error:
            self._own.close()
            self._source.close()
            if isinstance(error, TimeoutError):
                raise JobError(f"vLLM did not start in {longest:g} s") from error
            raise

    @property
    def version(self) -> int:
        """The version of the weights that answer a request sent now."""
        return self._served.version

    @property
    def digest(self) -> str | None:
        """The digest of these weights."""
        return self._served.digest

    @property
    def backend(self) -> Backend | None:
        """The running vLLM; None after it died, until the next request."""
        return self._backend

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        """Sample for requests, and return the answers in the same order.

        Raises PolicyError if vLLM died, returned invalid log-probs, or exceeded the timeout.
        """
        asked = [PendingRequest(request) for request in requests]
        self._asked |= {id(one): one for one in asked}
        try:
            return await self._own.run(all_of(map(self._answer, asked)))
        finally:
            for one in asked:
                del self._asked[id(one)]

    async def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-prob of each of `token_ids` after the prompt, in nats.

        Raises ConfigError at any temperature but 1, since vLLM scores prompts only at 1, and
        PolicyError if vLLM died, returned invalid log-probs, exceeded the timeout, or has no room
        for the prompt and one more token.
        """
        if temperature != 1:
            raise ConfigError(
                f"vLLM scores given tokens at temperature 1, not {temperature:g}; "
                "sample at temperature 1, or set `engine: transformers` for the scoring model"
            )
        ids = [*prompt_ids, *token_ids]
        if self.max_length is not None and len(ids) >= self.max_length:
            raise PolicyError(
                f"the model scores at most {self.max_length - 1} tokens, got {len(ids)}",
                finish_reason="context_overflow",
            )
        scores = await self._own.run(self._scored(ids))
        return scores[len(prompt_ids) - 1 :]

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests now; they are answered with the tokens so far."""
        wanted = {id(request) for request in requests}
        self._end([one for one in self._asked.values() if id(one.request) in wanted])

    async def swap(self, weights: Weights) -> None:
        """Replace the weights between two tokens.

        Raises JobError if they are damaged or belong to another model; the old ones stay.
        """
        # To its end, even if the caller is cancelled: half-loaded weights have no version.
        await self._own.run(self._swap(weights), to_the_end=True)

    async def sleep(self) -> None:
        """Free the GPU's memory until the next request or weights, if the settings say `sleep`."""
        if self._settings.sleep:
            await self._own.run(self._sleep(), to_the_end=True)

    async def close(self) -> None:
        """Answer requests under way with the tokens so far, and stop vLLM."""
        self._end(list(self._asked.values()))
        await self._own.run(self._close(), to_the_end=True)
        await asyncio.to_thread(self._own.close)
        self._source.close()

    def _end(self, asked: Sequence[PendingRequest]) -> None:
        for one in asked:
            one.is_ended = True
        if asked:
            self._own.soon(lambda: asyncio.ensure_future(self._abort(asked)))

    async def _abort(self, asked: Sequence[PendingRequest]) -> None:
        if (backend := self._backend) is not None:
            try:
                await backend.abort(asked)
            except DiedError as error:
                await self._died(backend, error)

    async def _start(self) -> None:
        backend = Backend(
            self._settings, dtype=self._dtype, adapter=self._source.adapter, rope=self._rope
        )
        folder, has_weights = self._source.folder(self._served)
        try:
            await backend.start(folder, has_weights=has_weights)
            answers = [*await backend.call("refuses"), *await backend.call("gives_full_logprobs")]
            if refused := [answer for answer in answers if answer is not None]:
                raise ConfigError(f"vLLM cannot serve `{folder}`: {refused[0]}")
            if (base := await asyncio.to_thread(self._source.base)) is not None:
                await self._take_in(backend, base)
            if self._served.loaded_digest is not None:
                await self._take_in(backend, self._served)
        except BaseException:
            await backend.stop()
            raise
        self._backend, self.max_length = backend, backend.max_length

    async def _answer(self, asked: PendingRequest) -> Sampled:
        """Sample piece by piece; a piece ends when the weights change."""
        answer, longest = Answer(asked.request), self._settings.request_timeout
        try:
            async with asyncio.timeout(longest):
                while not answer.is_done and not asked.is_ended:
                    await self._go_on(asked, answer)
        except TimeoutError:
            raise PolicyError(f"vLLM did not answer in {longest:g} s") from None
        return answer.sampled(self.tokenizer)

    async def _scored(self, token_ids: Sequence[int]) -> list[float]:
        """Score all tokens but the first, from the start again if the weights change meanwhile."""
        longest, scores = self._settings.request_timeout, None
        try:
            async with asyncio.timeout(longest):
                while scores is None:
                    async with self._changing:
                        backend = await self._running()
                    try:
                        scores = await backend.score(uuid4().hex, token_ids)
                    except DiedError as error:
                        await self._died(backend, error)
                        raise PolicyError(str(error)) from error
        except TimeoutError:
            raise PolicyError(f"vLLM did not answer in {longest:g} s") from None
        except (LookupError, TypeError, ValueError) as error:
            raise PolicyError(f"vLLM returned an invalid answer: {error!r}") from error
        if odd := [score for score in scores if not is_sane(score)]:
            raise PolicyError(f"vLLM returned an invalid log-prob: {odd[0]}")
        return scores

    async def _go_on(self, asked: PendingRequest, answer: Answer) -> None:
        # Held only until a change of weights under way is over: the next change must not wait for
        # the answer, but stop it.
        async with self._changing:
            backend = await self._running()
        sampling, asked.on_tokens = answer.rest, answer.on_tokens
        ids, media = [*asked.request.prompt_ids, *answer.token_ids], asked.request.media
        # an image is decoded in milliseconds or more, and other requests go on meanwhile
        prompt = (
            await asyncio.to_thread(prompt_of, ids, media, self._images)
            if media
            else prompt_of(ids)
        )
        asked.name = content_id(asked.name, len(answer.token_ids), length=32)
        try:
            piece = await backend.sample(asked, prompt, sampling)
            # A grammar is followed from its beginning: an answer that new weights interrupted
            # begins anew.
            if not (asked.request.grammar and piece.finish_reason == "abort") or asked.is_ended:
                answer.add(piece)
        except DiedError as error:
            await self._died(backend, error)
            raise PolicyError(str(error)) from error

    async def _running(self) -> Backend:
        """Return the running vLLM, restarted if it died. Raises PolicyError if that fails."""
        while (backend := self._backend) is None:
            starting = self._starting or self._start_again()
            await asyncio.wait([starting])  # does not cancel it: other requests wait for it too
            if starting.cancelled():
                raise PolicyError("the engine was closed")
            if (error := starting.exception()) is not None:
                message = f"vLLM died and could not be restarted: {error}"
                raise PolicyError(message) from error
        if backend.is_asleep:
            try:
                await backend.wake_up()
            except DiedError as error:
                await self._died(backend, error)
                return await self._running()
        return backend

    async def _sleep(self) -> None:
        async with self._changing:
            if (backend := self._backend) is not None and not backend.is_asleep:
                try:
                    await backend.sleep()
                except DiedError as error:
                    await self._died(backend, error)

    def _start_again(self) -> "asyncio.Task[None]":
        if self.restarts >= self._settings.max_restarts:
            raise PolicyError(f"vLLM died after {self.restarts} restarts")
        self.restarts += 1
        _log.warning("vLLM died; restarting it with version %d", self.version)
        self._starting = asyncio.create_task(self._start())
        self._starting.add_done_callback(self._started)
        return self._starting

    def _started(self, starting: "asyncio.Task[None]") -> None:
        self._starting = None
        if not starting.cancelled() and (error := starting.exception()) is not None:
            _log.warning("vLLM could not be restarted: %s", error)

    async def _died(self, backend: Backend, error: DiedError) -> None:
        if self._backend is backend:
            _log.warning("%s", error)
            self._backend = None
            # To its end, even if the request that noticed it is cancelled meanwhile.
            stopping = asyncio.create_task(backend.stop())
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)
            await asyncio.shield(stopping)

    async def _swap(self, weights: Weights) -> None:
        new = await asyncio.to_thread(self._source.incoming, weights)
        verify = is_verified(self._updates, self._settings.verify_weights)
        self._updates += 1
        async with self._changing:
            try:
                await self._take_in(await self._running(), new, is_verified=verify)
            except DiedError:
                # Once more: it may have died of something else, and then with the old ones again.
                await self._take_in(await self._running(), new)
            # Only now that vLLM has them: a restart before this begins with the old ones.
            self._served = new

    async def _take_in(
        self, backend: Backend, new: IncomingWeights, *, is_verified: bool = True
    ) -> None:
        try:
            self.verified = await update(backend, new, self._block, is_verified=is_verified)
        except DiedError as error:
            await self._died(backend, error)
            raise

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others and self._asked:
            await asyncio.wait(others, timeout=ENDING_SECONDS)
        if (starting := self._starting) is not None:
            starting.cancel()
            await asyncio.wait([starting])
        async with self._changing:
            if self._backend is not None:
                backend, self._backend = self._backend, None
                await backend.stop()
        if self._stopping:
            await asyncio.wait(self._stopping)
