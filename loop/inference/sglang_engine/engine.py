"""The engine that samples at SGLang servers."""

import asyncio
import json
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ....store.errors import ConfigError, JobError
from ...config import FrozenModel
from ...config.engines import SglangEngine as Settings
from ...models.chat_template import set_template
from ...models.remote_weights import is_remote, not_here
from ...models.state_dict import weights_digest
from ...models.weights import Weights
from ..engine import Request, Sampled
from ..event_loop import BackgroundLoop
from ..incoming_weights import IncomingWeights, WeightSource
from ..policy import PolicyError
from .answers import Answer, body_of, scores_of
from .server import AGAIN_SECONDS, Labeled, LostError, Server

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Served(Labeled):
    """The weights that answer requests sent now."""

    weights: IncomingWeights


def _served(weights: IncomingWeights, folder: Path) -> _Served:
    label = json.dumps([weights.version, weights.digest])
    return _Served(folder, label, weights)


@dataclass(eq=False)
class _Pending:
    """A request under way."""

    request: Request
    rid: str = field(default_factory=lambda: uuid4().hex)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is to be answered with the tokens so far."""


class SglangEngine:
    """SGLang servers, with weights that are replaced while they run.

    For new weights a server stops between two tokens, computes the KV cache of the requests under
    way anew, and goes on with them. Its scheduler labels each token with the weights that sampled
    it. The digest of a version's tensors is computed here, before a server reads them.

    A server that was restarted has other weights than its last label said: it is given the newest
    ones again, and its requests are repeated. An adapter is merged into its base model.
    """

    name = "sglang"

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        *,
        dtype: str = "float32",
        model: FrozenModel | None = None,
    ) -> None:
        """Connect to the servers, and give them the weights of a folder.

        `model` has the chat template and whether code of the model is run. Raises ConfigError if a
        server has another model, JobError if it does not answer.
        """
        if is_remote(folder):
            raise ConfigError(not_here(folder))
        trust = model is not None and model.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust)
        if model is not None:
            set_template(tokenizer, model)
        self.tokenizer: PreTrainedTokenizerFast = tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        self._settings = settings
        self._servers = [Server(url, settings) for url in settings.urls]
        self._source = WeightSource(folder, dtype=dtype, merge_adapter=True)
        first = self._source.start()
        self._served = _served(first, self._source.written(first))
        self._labels = {self._served.label}
        self._asked: dict[int, _Pending] = {}
        self._room = asyncio.Semaphore(settings.max_requests)
        self._own = BackgroundLoop("sglang")
        try:
            self._own.submit(self._connect()).result()
        except BaseException:
            self._own.submit(self._disconnect()).result()
            self._own.close()
            self._source.close()
            raise
        self.max_length: int | None = min(server.max_length for server in self._servers)

    @property
    def version(self) -> int:
        """The version of the weights that answer a request sent now."""
        return self._served.weights.version

    @property
    def digest(self) -> str | None:
        """The digest of these weights."""
        return self._served.weights.digest

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        """Sample for requests, and return the answers in the same order.

        Raises PolicyError if a server refuses a request, gives an invalid answer, or is gone for
        longer than the restart timeout.
        """
        asked = [_Pending(request) for request in requests]
        self._asked |= {id(one.request): one for one in asked}
        try:
            return await self._own.run(self._complete(asked))
        finally:
            for one in asked:
                del self._asked[id(one.request)]

    async def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-prob of each of `token_ids` after the prompt, in nats.

        Raises ConfigError at any temperature but 1, and PolicyError as `complete` does.
        """
        if temperature != 1:
            raise ConfigError(
                f"SGLang scores given tokens at temperature 1, not {temperature:g}; sample at "
                "temperature 1, or set `engine: transformers` for the scoring model"
            )
        ids = [*prompt_ids, *token_ids]
        if self.max_length is not None and len(ids) > self.max_length:
            raise PolicyError(
                f"the servers score at most {self.max_length} tokens, got {len(ids)}; score fewer, "
                "or start them with a larger `--context-length`",
                finish_reason="context_overflow",
            )

        async def scored() -> list[float]:
            while True:
                server = await self._ready()
                found, label = await self._scored(server, ids, len(token_ids))
                if label == self._served.label:
                    return found

        return await self._own.run(self._in_time(scored()))

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests; they are answered with the tokens so far."""
        asked = [self._asked[id(one)] for one in requests if id(one) in self._asked]
        self._own.soon(lambda: [one.ended.set() for one in asked])

    async def swap(self, weights: Weights) -> None:
        """Replace the weights between two tokens.

        Raises JobError if they are damaged or belong to another model; the old ones stay.
        """
        # To its end, even if the caller is cancelled: half of the servers would have other weights.
        await self._own.run(self._swap(weights), to_the_end=True)

    async def close(self) -> None:
        """Answer requests under way with the tokens so far, and close the connections."""
        self.abort([one.request for one in self._asked.values()])
        await self._own.run(self._disconnect(), to_the_end=True)
        await asyncio.to_thread(self._own.close)
        self._source.close()

    async def _connect(self) -> None:
        for server in self._servers:
            await server.connect(self._source.settings)
        await self._give_all(self._served, self._served)
        for server in self._servers:
            await server.check_labels(self._served.label)

    async def _disconnect(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others and self._asked:
            await asyncio.wait(others, timeout=4 * AGAIN_SECONDS)
        for server in self._servers:
            await server.close()

    async def _swap(self, weights: Weights) -> None:
        new = await asyncio.to_thread(self._source.incoming, weights)
        await asyncio.to_thread(_check_digest, new)
        before = self._served
        # Before the servers have them: one that is restarted meanwhile is given these.
        self._served = _served(new, await asyncio.to_thread(self._source.written, new))
        self._labels.add(self._served.label)
        try:
            await self._give_all(self._served, before)
        except BaseException:
            # Servers that have the new ones are given the old ones with their next requests.
            self._served = before
            raise

    async def _give_all(self, served: _Served, before: _Served) -> None:
        """Give all servers the weights; of several, one that is gone gets them when it is back."""
        lost = await self._given(served, before, waits=False)
        if len(lost) == len(self._servers):
            lost = await self._given(served, before, waits=True)
        if len(lost) == len(self._servers):
            raise lost[0]
        for error in lost:
            _log.warning("%s; version %d is sampled without it", error, served.weights.version)

    async def _given(self, served: _Served, before: _Served, *, waits: bool) -> list[LostError]:
        work = (self._give(server, served, before, waits=waits) for server in self._servers)
        done = await asyncio.gather(*work, return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException) and not isinstance(result, LostError):
                raise result
        return [result for result in done if isinstance(result, LostError)]

    async def _give(
        self, server: Server, served: _Served, before: _Served, *, waits: bool = True
    ) -> None:
        """Give a server the weights that it has not; it `waits` for one that is restarted."""
        async with server.changing:
            if server.label == served.label:
                return
            try:
                await server.load(served, before)
            except LostError:
                if not waits:
                    raise
                await server.reach()
                await server.load(served, before)

    async def _ready(self) -> Server:
        """Return the least busy server, with the newest weights."""
        known = [one for one in self._servers if one.label is not None]
        server = min(known or self._servers, key=lambda one: one.busy)
        # During a change of weights this waits for its end.
        await self._give(server, self._served, self._served)
        return server

    async def _complete(self, asked: Sequence[_Pending]) -> list[Sampled]:
        tasks = [asyncio.create_task(self._answer(one)) for one in asked]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, asked: _Pending) -> Sampled:
        answer = Answer(asked.request)
        async with self._room:
            return await self._in_time(self._sampled(asked, answer))

    async def _in_time(self, work: Coroutine[Any, Any, Any]) -> Any:
        longest = self._settings.request_timeout
        try:
            async with asyncio.timeout(longest):
                return await work
        except TimeoutError:
            raise PolicyError(
                f"SGLang did not answer in {longest:g} s; look at the server's log, or raise "
                "`request_timeout`"
            ) from None
        except LostError as error:
            raise PolicyError(str(error)) from error

    async def _sampled(self, asked: _Pending, answer: Answer) -> Sampled:
        """Sample until an answer is complete, or is to end."""
        while not asked.ended.is_set():
            server = await self._ready()
            try:
                found = await self._ask(server, asked, answer)
            except LostError:
                if answer.is_begun:
                    raise
                server.label = None
                asked.rid = uuid4().hex
                continue
            answer.read(found, server.name)
            if not answer.is_of(self._labels, server.name):
                server.label = None
            elif not answer.needs_scores or await self._rescored(server, answer):
                return answer.sampled()
            answer.begin_anew(server.name)
        return answer.aborted()

    async def _ask(self, server: Server, asked: _Pending, answer: Answer) -> dict[str, Any]:
        """Send a request, and an abort until it is answered if it is to end."""
        body = body_of(asked.request, asked.rid)
        sent = asyncio.create_task(server.generate(body, on_tokens=answer.on_tokens))
        ended = asyncio.create_task(asked.ended.wait())
        try:
            await asyncio.wait([sent, ended], return_when=asyncio.FIRST_COMPLETED)
            while not sent.done():
                # Again: an abort that arrives before its request, or in a change of weights, is
                # ignored.
                with suppress(LostError):
                    await server.abort(asked.rid)
                await asyncio.wait([sent], timeout=AGAIN_SECONDS)
            return sent.result()
        finally:
            ended.cancel()
            if not sent.done():
                sent.cancel()

    async def _rescored(self, server: Server, answer: Answer) -> bool:
        """Replace log-probs of a changed distribution by those of the model, if it still has it."""
        token_ids = answer.token_ids
        if not token_ids:
            return True
        ids = [*answer.request.prompt_ids, *token_ids]
        scores, label = await self._scored(server, ids, len(token_ids))
        return answer.take_scores(scores, label)

    async def _scored(
        self, server: Server, ids: Sequence[int], number: int
    ) -> tuple[list[float], str]:
        """Return the log-probs of the last tokens, and the label of the weights."""
        found = await server.generate(
            {
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": len(ids) - number - 1,
            }
        )
        return scores_of(found, ids[-number:], server.name)


def _check_digest(new: IncomingWeights) -> None:
    """Raise JobError if tensors are not what was published."""
    state = new.state
    if state is None:
        assert new.file is not None, "weights are in a file or in memory"
        state = load_file(new.file)
    if new.loaded_digest is not None and (found := weights_digest(state)) != new.loaded_digest:
        raise JobError(
            f"{new.name} has digest {found}, and {new.loaded_digest} was published; restore or "
            "retrain it"
        )
