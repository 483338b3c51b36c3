"""The engine in this process, on transformers: requests join and leave one running batch."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel

from ...config.engines import TransformersEngine as Settings
from ...models.images import Images
from ...models.load import eos_id, max_length
from ...models.weights import Weights
from ..engine import Request, Sampled
from ..policy import PolicyError
from ..scoring import score_in_thread
from .batch import Batch
from .model_runner import ModelRunner
from .sequence import Call
from .sequence import Sequence as Running
from .weight_loading import load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from .grammar import GrammarCompiler, GrammarMatcher

T = TypeVar("T")

TURNS = 4
"""Turns of the event loop between steps, in which workflows may send their next requests."""
SHORT_SECONDS = 0.003
"""A step this short runs in the loop's thread: handing it over would take longer."""


class TransformersEngine:
    """A transformers model that samples many requests in one batch.

    The model runs in its own thread, so that the event loop stays free. Requests begin and end and
    weights are replaced only between two steps, in the loop's thread: no lock is needed.

    transformers' ContinuousBatchingManager cannot replace it: it returns log-probs of the truncated
    distribution, has no seed per request, keeps old keys and values when weights change, and takes
    6 to 23 times the CPU time (transformers 5.19, with its start; 256 answers of 8 tokens).
    """

    name = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: "PreTrainedTokenizerFast",
        settings: Settings | None = None,
        *,
        version: int = 0,
        images: Images | None = None,
        record_experts: bool = False,
    ) -> None:
        """Raises ConfigError for a model with state besides keys and values.

        With `record_experts`, answers have the experts that the model's routers chose.
        """
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_length = max_length(model)
        self.version = version
        self.digest: str | None = None
        self._settings = settings or Settings()
        network = ModelRunner(
            model,
            most_tokens=self._settings.max_cache_tokens,
            images=images,
            record_experts=record_experts,
        )
        self._batch = Batch(network, end=eos_id(tokenizer))
        self._batch.writer = (version, None)
        self._calls: dict[Call, None] = {}
        self._waiting: deque[Running] = deque()
        self._swaps: deque[tuple[Weights, asyncio.Future[None]]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rlake-engine")
        self._job: Future[Any] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._is_wanted = self._is_closed = False
        self._grammars: GrammarCompiler | None = None
        self._compiling = threading.Lock()

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        """Sample for requests, in steps shared with all others, and return answers in order.

        Raises PolicyError if the model fails, or if a prompt leaves no room for an answer.
        """
        if not requests:
            return []
        loop = asyncio.get_running_loop()
        matchers = [await self._matcher(request.grammar) for request in requests]
        call = Call(loop.create_future(), [])
        call.sequences += [self._running(request, call) for request in requests]
        for one, matcher in zip(call.sequences, matchers, strict=True):
            one.matcher = matcher
        # First, because it raises if the engine is closed: nothing must then wait for an answer.
        self._wake(loop)
        self._calls[call] = None
        self._waiting.extend(call.sequences)
        try:
            return await call.future
        finally:
            self._give_up(call)

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests at the next step: they are answered with the tokens so far, as `abort`."""
        wanted = {id(request) for request in requests}
        # Only marked here: the model's thread may be working on these rows, and removes them later.
        for call in self._calls:
            for one in call.sequences:
                one.is_aborted |= id(one.request) in wanted
        self._is_wanted = True

    async def swap(self, weights: Weights) -> None:
        """Replace the weights between two steps; sequences under way are read again.

        Raises JobError if they are missing, damaged, or of another model; the old ones stay.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._wake(loop)
        self._swaps.append((weights, future))
        await future

    async def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-prob of each of `token_ids` after the prompt, in nats."""
        return await score_in_thread(self.model, prompt_ids, token_ids, temperature=temperature)

    async def close(self) -> None:
        """Drop requests under way and free all resources."""
        self._is_closed = True
        self._fail_all(PolicyError("the engine was closed"))
        pump = self._pump
        if pump is not None and not pump.done() and pump.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([pump])
        await self._settle()
        self._batch.clear()
        self._worker.shutdown(wait=False)

    async def _matcher(self, grammar: str | None) -> "GrammarMatcher | None":
        """Return a matcher of a grammar, compiled in another thread: that may take a second."""
        if grammar is None:
            return None

        def made() -> "GrammarMatcher":
            from .grammar import GrammarCompiler

            with self._compiling:
                if self._grammars is None:
                    size = self.model.config.get_text_config().vocab_size
                    self._grammars = GrammarCompiler(deepcopy(self.tokenizer), size)
                return self._grammars.matcher(grammar)

        return await asyncio.to_thread(made)

    def _running(self, request: Request, call: Call) -> Running:
        longest = self._settings.max_cache_tokens
        if self.max_length is not None:
            longest = min(longest, self.max_length)
        room = longest - len(request.prompt_ids)
        if room < 1:
            raise PolicyError(
                f"the prompt has {len(request.prompt_ids)} tokens, the engine takes {longest}",
                finish_reason="context_overflow",
            )
        if request.sampling.stop and self._batch.text is str:
            # a copy: the loop's thread uses the tokenizer too, and it is not thread-safe
            tokenizer = deepcopy(self.tokenizer)
            self._batch.text = partial(tokenizer.decode, skip_special_tokens=True)  # type: ignore[assignment]
        return Running(request, call, most=min(request.sampling.max_tokens, room))

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make sure that the pump runs. Raises PolicyError if the engine is closed."""
        if self._is_closed:
            raise PolicyError("the engine was closed")
        self._is_wanted = True
        pump = self._pump
        # A pump of a loop that was closed never ends, and never runs again.
        if pump is None or pump.done() or pump.get_loop() is not loop:
            self._pump = loop.create_task(self._run())

    async def _run(self) -> None:
        """Run steps until nothing is left to do; the next request starts another task."""
        try:
            await self._settle()
            self._drop_dead_loops()
            await _yield_loop()
            while not self._is_closed:
                await self._take_weights()
                self._end_stopped()
                if self._answer():
                    await _yield_loop()
                    continue
                new = self._admit()
                if not new and not self._batch.rows:
                    return
                await self._advance(new)
        except BaseException as error:
            self._fail_all(PolicyError(f"the engine stopped: {error!r}"))
            raise

    async def _advance(self, new: list[Running]) -> None:
        self._is_wanted = False  # first: a request that arrives from now on ends the steps below
        try:
            if self._batch.seconds(new) <= SHORT_SECONDS:
                self._batch.advance(new, lambda: True)
                await _yield_loop()
            else:
                await self._work(lambda: self._batch.advance(new, lambda: self._is_wanted))
        except Exception as error:  # noqa: BLE001 - the boundary to the model: every waiter gets the error
            self._broke([*self._batch.rows, *new], error)

    async def _take_weights(self) -> None:
        while self._swaps:
            weights, future = self._swaps[0]
            if not future.done():
                try:
                    await self._work(partial(self._replace, weights))
                except Exception as error:  # noqa: BLE001 - raised by `swap`; the old weights stay
                    if not future.done():
                        future.set_exception(error)
                else:
                    # Before the next step: its keys and values must be of the new weights alone.
                    await self._read_again()
                    if not future.done():
                        future.set_result(None)
            # Only now: while the weights are loaded, `_fail_all` must still find
            # who waits for them.
            self._swaps.popleft()

    def _replace(self, weights: Weights) -> None:
        self.digest = load_weights(self.model, weights)
        self.version = weights.version
        self._batch.writer = (self.version, self.digest)

    async def _read_again(self) -> None:
        self._end_stopped()
        if not self._batch.rows:
            return
        try:
            await self._work(self._batch.read_again)
        except Exception as error:  # noqa: BLE001 - the boundary to the model: every waiter gets the error
            self._broke(self._batch.rows, error)

    async def _work(self, job: Callable[[], T]) -> T:
        """Run a job in the model's thread, with the caller's number of torch threads."""
        threads = torch.get_num_threads()

        def work() -> T:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            return job()

        future = self._worker.submit(work)
        self._job = future
        return await asyncio.wrap_future(future)

    async def _settle(self) -> None:
        """Wait for a job of the thread whose caller was cancelled."""
        job = self._job
        while job is not None and not (job.cancel() or job.done()):
            await asyncio.sleep(0)

    def _admit(self) -> list[Running]:
        """Admit waiting sequences in order, while all fit at their full lengths.

        Counting full lengths means that no running sequence ever has to be evicted.
        """
        new: list[Running] = []
        longest = max((row.longest for row in self._batch.rows), default=0)
        while self._waiting:
            one = self._waiting[0]
            rows = len(self._batch.rows) + len(new) + 1
            longest = max(longest, one.longest)
            is_full = rows * longest > self._settings.max_cache_tokens and rows > 1
            if is_full or rows > self._settings.max_requests:
                break
            self._waiting.popleft()
            one.begin()
            new.append(one)
        return new

    def _end_stopped(self) -> None:
        if not all(one.is_running for one in self._batch.rows):
            self._batch.drop()
        stopped = [one for one in self._waiting if not one.is_running]
        if stopped:
            self._waiting = deque(one for one in self._waiting if one.is_running)
            self._batch.ended += stopped

    def _answer(self) -> bool:
        """Deliver the sequences that ended; return whether there were any."""
        ended, self._batch.ended = self._batch.ended, []
        for one in ended:
            one.end()
        for call in dict.fromkeys(one.call for one in ended):
            call.answer()
        return bool(ended)

    def _broke(self, those: list[Running], error: Exception) -> None:
        message = PolicyError(f"sampling failed: {type(error).__name__}: {error}")
        self._fail([one.call for one in [*those, *self._batch.ended]], message)
        self._batch.clear()

    def _fail_all(self, error: PolicyError) -> None:
        self._fail(list(self._calls), error)
        for _, future in self._swaps:
            if not future.done():
                future.set_exception(error)

    def _fail(self, calls: list[Call], error: PolicyError) -> None:
        for call in calls:
            if not call.future.done():
                call.future.set_exception(error)
            self._give_up(call)

    def _give_up(self, call: Call) -> None:
        self._calls.pop(call, None)
        call.give_up()
        self._is_wanted = True

    def _drop_dead_loops(self) -> None:
        """Drop requests of event loops that ended."""
        loop = asyncio.get_running_loop()
        for call in [call for call in self._calls if call.future.get_loop() is not loop]:
            self._give_up(call)
        self._swaps = deque(one for one in self._swaps if one[1].get_loop() is loop)
        if self._batch.rows:
            self._batch.clear()


async def _yield_loop() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)
