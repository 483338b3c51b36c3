"""Handle chat requests: parse, sample from a policy, record the turns, and respond."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from fastapi import Request, Response

from ...store.records import Message
from ..config.serve import ServeConfig
from ..inference.messages import after
from ..inference.policy import Policy
from ..inference.token_stream import TokenStream, streaming_to
from . import requests as form
from . import responses
from .errors import RequestError
from .exchange import ChatExchange, Format
from .generation import generate
from .idempotency import Retries, Retry, retry_of
from .images import with_stored_images
from .limits import RequestLimiter
from .metrics import ServingMetrics
from .replies import PATIENCE_SECONDS, Stream, whole
from .requests import ChatRequest, of_header
from .responses_api import ResponseRequest
from .sessions import Session, Sessions, with_own_calls

_log = logging.getLogger(__name__)


class Serving:
    """Answers requests with one policy, or with several by name."""

    def __init__(
        self,
        policies: Policy | Mapping[str, Policy],
        sessions: Sessions,
        settings: ServeConfig,
        metrics: ServingMetrics,
        check: Callable[[], None],
        *,
        answered: Iterable[str] = (),
    ) -> None:
        """Serve policies; `answered` are the names of responses of an earlier server."""
        named = policies if isinstance(policies, Mapping) else {"policy": policies}
        self.policies, self._any = dict(named), not isinstance(policies, Mapping)
        self.sessions, self._settings, self.metrics = sessions, settings, metrics
        self.check = check
        self._limiter = RequestLimiter(settings.limits)
        self._retries = Retries(answered, most_bytes=settings.limits.retry_bytes)

    @property
    def waiting(self) -> int:
        """The number of queued requests."""
        return self._limiter.waiting

    def policy(self, name: str | None) -> tuple[str, Policy]:
        """Return a policy by its name, or the first one if the request names none."""
        first = next(iter(self.policies))
        found = name if name in self.policies else first if self._any or name is None else None
        if found is None:
            known = ", ".join(self.policies)
            message = f"unknown model `{name:.100}`; this server has {known}"
            raise RequestError(message, param="model", code="model_not_found", status=404)
        return (name or found) if self._any else found, self.policies[found]

    async def body(self, request: Request) -> bytes:
        """Read a body whose bytes count only while it is read."""
        with self._limiter.holding() as held:
            return await held.read(request.stream())

    async def measured(self, path: str, answer: Awaitable[Response]) -> Response:
        """Count a response, and turn RequestError into one."""
        try:
            made = await answer
        except RequestError as error:
            made = error.response()
        except Exception:
            self.metrics.responses.labels(path, "500").inc()
            raise
        self.metrics.responses.labels(path, str(made.status_code)).inc()
        return made

    async def answer(self, form: Format, request: Request, session_id: str | None) -> Response:
        """Answer a request of one of the APIs, and count the response."""
        return await self.measured(form.name, self._respond(form, request, session_id))

    async def _respond(self, api: Format, request: Request, session_id: str | None) -> Response:
        began = time.perf_counter()
        self.check()
        with ExitStack() as holds:
            held = holds.enter_context(self._limiter.holding())
            body = await held.read(request.stream())
            asked = api.read(form.parse(body))
            name, policy = self.policy(asked.model)
            session, group = _names(request, session_id, asked)
            earlier = self._earlier(asked)
            listener = TokenStream() if asked.is_streamed else None
            text = token_text(policy)
            exchange = ChatExchange(api, asked, name, text, len(body), began, listener)
            retry = retry_of(request, asked, body)
            if retry is not None:
                exchange.id = retry.response_id  # stable, so that a restarted server knows it
            if earlier is not None:
                session = session or earlier.id
            elif isinstance(asked, ResponseRequest) and asked.is_kept:
                session = session or exchange.id  # so that a later request can continue it
            # A task of its own, which can be cancelled when the client leaves, and outlives this
            # call when its answer is streamed.
            work = asyncio.create_task(self._answer(exchange, retry, policy, session, group))
            await self._wait(request, work, listener)
            if listener is not None and listener.is_begun:
                self.metrics.first_token.observe(time.perf_counter() - began)
            if listener is not None and not work.done():
                # The stream takes over the budget of the body, and releases it when it ends.
                return Stream(exchange, listener, work, self.metrics, holds.pop_all().close)
        work.result()
        return whole(exchange, self.metrics)

    async def _wait(
        self, request: Request, work: "asyncio.Task[None]", listener: TokenStream | None
    ) -> None:
        """Wait for an answer; if it is streamed, only for its first token or for a while.

        The request is cancelled when its client disconnects.
        """
        left = asyncio.create_task(_gone(request))
        begun = [] if listener is None else [asyncio.create_task(listener.changed())]
        patience = None if listener is None else PATIENCE_SECONDS
        try:
            await asyncio.wait(
                {work, left, *begun}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            if left.done() and not work.done():
                self.metrics.left.inc()
                raise RequestError("the client went away", status=499)
        except BaseException:
            work.cancel()
            raise
        finally:
            for one in (left, *begun):
                one.cancel()

    async def _answer(
        self,
        exchange: ChatExchange,
        retry: Retry | None,
        policy: Policy,
        session_id: str | None,
        group_id: str | None,
    ) -> None:
        async with self._retries.once(exchange, retry) as is_first:
            if not is_first:
                return
            with self.sessions.request(session_id, group_id) as session:
                exchange.session_id = session.id
                asked: list[list[Message]] = []
                for messages in exchange.asked.conversations(_texts(policy)):
                    shown, shorter = await with_stored_images(
                        policy, messages, self._settings.limits
                    )
                    exchange.nbytes -= shorter  # what the session keeps has no image
                    asked.append(session.as_recorded(_continued(exchange.asked, session, shown)))
                async with self._limiter.slot():
                    began = time.perf_counter()
                    # Around the sampling only: what else is sampled for this request
                    # is not its answer.
                    with streaming_to(exchange.listener):
                        answers = [
                            await generate(policy, exchange.asked, messages, session)
                            for messages in asked
                        ]
                    exchange.engine_seconds = time.perf_counter() - began
                # Before recording: it raises if the client was already streamed a different text.
                sampled = [one for _, made in answers for one in made]
                exchange.sampled(
                    [with_own_calls(one, exchange.id, i) for i, one in enumerate(sampled)]
                )
                self._count(exchange)
                prompts = [messages for messages, _ in answers]
                await to_its_end(self._record(exchange, session, prompts))

    async def _record(
        self, exchange: ChatExchange, session: Session, asked: Sequence[Sequence[Message]]
    ) -> None:
        n = exchange.asked.n
        for i, messages in enumerate(asked):
            made = exchange.completions[i * n : (i + 1) * n]
            await self.sessions.record(
                session,
                messages,
                exchange.asked.tools,
                # what was asked about other tokens is not part of what was sampled
                [replace(one, top_logprobs=None) if one.top_logprobs else one for one in made],
                response_id=exchange.id,
                nbytes=exchange.nbytes,
            )
        exchange.recorded = time.perf_counter()

    def _count(self, exchange: ChatExchange) -> None:
        name, completions = exchange.model, exchange.completions
        usage = responses.usage(completions, exchange.asked.n)
        self.metrics.tokens.labels(name, "prompt").inc(usage["prompt_tokens"])
        self.metrics.tokens.labels(name, "sampled").inc(usage["completion_tokens"])
        for one in completions:
            self.metrics.finished.labels(name, one.finish_reason).inc()
        self.metrics.turns.inc(len(completions))

    def _earlier(self, asked: ChatRequest) -> Session | None:
        """Return the session of the response that a request continues."""
        if asked.previous_id is None:
            return None
        found = self.sessions.of_response(asked.previous_id)
        if found is None:
            raise RequestError(
                f"no open session has the response `{asked.previous_id}`; sessions end after "
                f"{self._settings.session_idle_timeout:g} s without a request: send the whole "
                "conversation as `input`",
                param="previous_response_id",
                code="previous_response_not_found",
                status=404,
            )
        return found

    def gauge(self) -> None:
        """Set the gauges to their current values."""
        numbers, sessions = self.metrics, self.sessions
        numbers.running.set(self._limiter.running)
        numbers.waiting.set(self._limiter.waiting)
        numbers.sessions.set(len(sessions))
        numbers.session_bytes.set(sessions.nbytes)
        for name, policy in self.policies.items():
            numbers.version.labels(name).set(policy.version or 0)

    async def sweep(self) -> None:
        """End idle sessions at intervals, for as long as the server runs."""
        tick = asyncio.Event()  # never set: the timeout is the clock
        pause = min(5.0, self._settings.session_idle_timeout / 4)
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(tick.wait(), pause)
            try:
                await self.sessions.sweep()
            except Exception:  # noqa: BLE001 - the next sweep repeats it
                _log.exception("idle sessions could not be ended")


def _continued(
    asked: ChatRequest, session: Session, messages: Sequence[Message]
) -> Sequence[Message]:
    """Return messages after the conversation that a request continues, without its system's."""
    if asked.previous_id is None:
        return messages
    pairs = zip(session.turns, session.responses, strict=True)
    turn = next((turn for turn, name in pairs if name == asked.previous_id), None)
    if turn is None:
        message = "the response is of another session than the request names; name the same"
        raise RequestError(message, param="previous_response_id")
    system = [m for m in messages[:1] if m.get("role") == "system"]
    before = [m for m in after(turn) if m.get("role") != "system"]
    return [*system, *before, *messages[len(system) :]]


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that is completed even if the caller is cancelled."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _names(
    request: Request, session_id: str | None, asked: ChatRequest
) -> tuple[str | None, str | None]:
    headers = request.headers
    named = form.identifier(session_id or None, "session_id")
    return (
        named or of_header(headers, "X-Session-Id") or asked.session_id,
        of_header(headers, "X-Group-Id") or asked.group_id,
    )


def token_text(policy: Policy) -> responses.TokenText:
    """Return a function from tokens to text, or to their numbers without a tokenizer."""
    text = _texts(policy)
    return lambda token: text([token])


def _texts(policy: Policy) -> Callable[[list[int]], str]:
    text = getattr(getattr(policy, "inner", policy), "text", None)
    return text or (lambda tokens: " ".join(f"token_id:{token}" for token in tokens))


def about(name: str) -> dict[str, Any]:
    """Return the description of a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "rlake"}
