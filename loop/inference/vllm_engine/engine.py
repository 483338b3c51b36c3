"""The engine that runs on vLLM, in this process or in a server of its own."""

import asyncio
import json
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ....store.errors import ConfigError, JobError, missing_extra
from ....store.ids import content_id
from ...config.engines import VllmEngine as Settings
from ...models.weights import Weights
from ..engine import Request, Sampled
from ..event_loop import BackgroundLoop
from ..policy import PolicyError
from .backend import DiedError, PendingRequest, Serving
from .in_process import Inside
from .output import Answer, is_sane
from .server import Server
from .weight_folders import MaterializedWeights, WeightFolders

GRACE_SECONDS = 30.0
"""How much longer than it may take a start is waited for: vLLM ends it, and says why."""
ENDING_SECONDS = 2.0
"""How long requests under way may take to be answered when the engine is closed."""

_log = logging.getLogger(__name__)


class VllmEngine:
    """vLLM, whose weights are replaced while it runs.

    For new weights all requests are stopped between two tokens, and go on behind what they have
    with a cache that is worked out again. Which weights a token is of says vLLM's own scheduler,
    which labels each step. What it serves is known by the digest of the very tensors that its
    workers load; they then compare what the model multiplies with to these tensors (`verified`).

    When vLLM dies, requests under way end with PolicyError, and it is started again with the
    newest weights for those that follow, `restarts` times at most.
    """

    name = "vllm"

    def __init__(
        self, folder: Path, settings: Settings | None = None, *, dtype: str = "float32"
    ) -> None:
        """Start it with the model of a folder; raises JobError when it does not start."""
        if find_spec("vllm") is None:
            raise missing_extra("vllm", "vllm")
        self._settings, self._dtype = settings or Settings(), dtype
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.tokenizer: PreTrainedTokenizerFast = tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        self.verified: tuple[int, int] = (0, 0)
        """How many tensors were loaded last, and how many of them were compared."""
        self.restarts = 0
        """How often it was started again."""
        self.max_length: int | None = None
        self._asked: dict[int, PendingRequest] = {}
        self._folders = WeightFolders(folder, dtype=dtype)
        self._served = self._folders.start()
        self._serving: Serving | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._own = BackgroundLoop("vllm")
        longest = self._settings.startup_timeout
        try:
            self._own.wait(self._start(), seconds=longest + GRACE_SECONDS)
        except BaseException as error:
            self._own.close()
            self._folders.close()
            if isinstance(error, TimeoutError):
                raise JobError(f"vLLM did not start in {longest:g} s") from error
            raise

    @property
    def version(self) -> int:
        """The version that a request sent now begins with."""
        return self._served.version

    @property
    def digest(self) -> str | None:
        """The digest of the weights that are served."""
        return self._served.digest

    @property
    def serving(self) -> Serving | None:
        """The vLLM that runs; None after it died, until somebody asks again."""
        return self._serving

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        """Sample for requests, in their order.

        Raises PolicyError when vLLM died, answered nonsense, or took longer than it may.
        """
        asked = [PendingRequest(request) for request in requests]
        self._asked |= {id(one): one for one in asked}
        try:
            return await self._own.run(self._complete(asked))
        finally:
            for one in asked:
                del self._asked[id(one)]

    async def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-prob of each of `token_ids` behind the prompt, in nats.

        Raises ConfigError at another temperature than 1, at which vLLM scores no prompt, and
        PolicyError when vLLM died, answered nonsense, took too long, or takes no prompt so long: it
        must have room for one token more.
        """
        if temperature != 1:
            raise ConfigError(
                f"vLLM says how likely given tokens are at temperature 1, not {temperature:g}; "
                "sample at 1, or let the model that scores be on `engine: transformers`"
            )
        ids = [*prompt_ids, *token_ids]
        if self.max_length is not None and len(ids) >= self.max_length:
            raise PolicyError(
                f"{len(ids)} tokens are to be scored, the model takes {self.max_length - 1}",
                finish_reason="context_overflow",
            )
        scores = await self._own.run(self._scored(ids))
        return scores[len(prompt_ids) - 1 :]

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests now; they are answered with what they have."""
        wanted = {id(request) for request in requests}
        self._end([one for one in self._asked.values() if id(one.request) in wanted])

    async def swap(self, weights: Weights) -> None:
        """Replace the weights between two tokens.

        Raises JobError when they are damaged or another model's; then the old ones stay.
        """
        await self._own.run(self._swap(weights), to_the_end=True)

    async def close(self) -> None:
        """Answer what is under way with what it has, and end vLLM."""
        self._end(list(self._asked.values()))
        await self._own.run(self._close(), to_the_end=True)
        await asyncio.to_thread(self._own.close)
        self._folders.close()

    def _end(self, asked: Sequence[PendingRequest]) -> None:
        for one in asked:
            one.is_ended = True
        if asked:
            self._own.soon(lambda: asyncio.ensure_future(self._abort(asked)))

    async def _abort(self, asked: Sequence[PendingRequest]) -> None:
        if (serving := self._serving) is not None:
            try:
                await serving.abort(asked)
            except DiedError as error:
                await self._died(serving, error)

    async def _start(self) -> None:
        """Start vLLM, with the weights that were served before if there were any."""
        serving = self._new()
        try:
            await serving.start(self._served.folder)
            answers = [*await serving.call("refuses"), *await serving.call("gives_full_logprobs")]
            refused = [answer for answer in answers if answer not in (None, "None")]
            if refused:
                raise ConfigError(f"vLLM cannot serve `{self._served.folder}`: {refused[0]}")
            if self._served.file_digest is not None:
                await self._take_in(serving, self._served)
        except BaseException:
            await serving.stop()
            raise
        self._serving, self.max_length = serving, serving.max_length

    def _new(self) -> Serving:
        return (Server if self._settings.server else Inside)(self._settings, dtype=self._dtype)

    async def _complete(self, asked: Sequence[PendingRequest]) -> list[Sampled]:
        tasks = [asyncio.create_task(self._answer(one)) for one in asked]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, asked: PendingRequest) -> Sampled:
        """Sample piece by piece: a piece ends where the weights changed."""
        answer, longest = Answer(asked.request), self._settings.request_timeout
        try:
            async with asyncio.timeout(longest):
                while not answer.is_done and not asked.is_ended:
                    await self._go_on(asked, answer)
        except TimeoutError:
            raise PolicyError(f"vLLM did not answer in {longest:g} s") from None
        return answer.sampled(self.tokenizer)

    async def _scored(self, token_ids: Sequence[int]) -> list[float]:
        """Score a text's tokens but the first, again from its start if the weights changed."""
        longest, scores = self._settings.request_timeout, None
        try:
            async with asyncio.timeout(longest):
                while scores is None:
                    async with self._changing:
                        serving = await self._running()
                    try:
                        scores = await serving.score(uuid4().hex, token_ids)
                    except DiedError as error:
                        await self._died(serving, error)
                        raise PolicyError(str(error)) from error
        except TimeoutError:
            raise PolicyError(f"vLLM did not answer in {longest:g} s") from None
        except (LookupError, TypeError, ValueError) as error:
            raise PolicyError(f"vLLM answered nonsense: {error!r}") from error
        if odd := [score for score in scores if not is_sane(score)]:
            raise PolicyError(f"vLLM answered nonsense: a log-prob of {odd[0]}")
        return scores

    async def _go_on(self, asked: PendingRequest, answer: Answer) -> None:
        async with self._changing:
            serving = await self._running()
        sampling, asked.heard = answer.rest, answer.heard
        prompt = [*asked.request.prompt_ids, *answer.token_ids]
        asked.name = content_id(asked.name, len(answer.token_ids), length=32)
        try:
            answer.add(await serving.sample(asked, prompt, sampling))
        except DiedError as error:
            await self._died(serving, error)
            raise PolicyError(str(error)) from error

    async def _running(self) -> Serving:
        """Return the vLLM that runs, started again if it died; PolicyError when it may not."""
        while (serving := self._serving) is None:
            starting = self._starting or self._start_again()
            await asyncio.wait([starting])  # which goes on when this request is given up
            if starting.cancelled():
                raise PolicyError("the engine was closed")
            if (error := starting.exception()) is not None:
                message = f"vLLM died, and could not be started again: {error}"
                raise PolicyError(message) from error
        return serving

    def _start_again(self) -> "asyncio.Task[None]":
        if self.restarts >= self._settings.max_restarts:
            raise PolicyError(f"vLLM died, and was started again {self.restarts} times already")
        self.restarts += 1
        _log.warning("vLLM died; starting it again with version %d", self.version)
        self._starting = asyncio.create_task(self._start())
        self._starting.add_done_callback(self._started)
        return self._starting

    def _started(self, starting: "asyncio.Task[None]") -> None:
        self._starting = None
        if not starting.cancelled() and (error := starting.exception()) is not None:
            _log.warning("vLLM could not be started again: %s", error)

    async def _died(self, serving: Serving, error: DiedError) -> None:
        """Forget a vLLM that is gone; the first to see it ends what is left of it."""
        if self._serving is serving:
            _log.warning("%s", error)
            self._serving = None
            # to its end, whether or not the request that saw it first is given up meanwhile
            stopping = asyncio.create_task(serving.stop())
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)
            await asyncio.shield(stopping)

    async def _swap(self, weights: Weights) -> None:
        new = await asyncio.to_thread(self._folders.whole, weights)
        async with self._changing:
            serving = await self._running()
            try:
                await self._take_in(serving, new)
            except DiedError as error:
                await self._died(serving, error)
                await self._take_in(await self._running(), new)
            self._served = new
        self._folders.forget(but=new)

    async def _take_in(self, serving: Serving, new: MaterializedWeights) -> None:
        await serving.pause()
        message = await serving.call("take_in", str(new.folder), str(new.file_digest))
        if refused := [one["refused"] for one in message if "refused" in one]:
            await serving.resume()
            raise JobError(f"{refused[0]}; restore or retrain it")
        if differ := [name for one in message for name in one["differ"]]:
            error = DiedError(f"vLLM holds other weights than it was given: see `{differ[0]}`")
            await self._died(serving, error)
            raise error
        await serving.label(json.dumps([new.version, new.digest]))
        await serving.resume()
        self.verified = (
            sum(one["given"] for one in message),
            sum(one["compared"] for one in message),
        )

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others and self._asked:
            await asyncio.wait(others, timeout=ENDING_SECONDS)
        if (starting := self._starting) is not None:
            starting.cancel()
            await asyncio.wait([starting])
        async with self._changing:
            if self._serving is not None:
                serving, self._serving = self._serving, None
                await serving.stop()
        if self._stopping:
            await asyncio.wait(self._stopping)
