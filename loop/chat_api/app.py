"""The FastAPI application: OpenAI's chat and models API over policies, with recording."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..config.serve import ServeConfig
from ..inference.policy import Policy
from . import requests as form
from .completions import Serving, about
from .errors import RequestError
from .formats import CHAT, COMPLETIONS, RESPONSES
from .limits import FEEDBACK_PATH, Guard
from .metrics import CONTENT_TYPE, ServingMetrics
from .requests import of_header
from .sessions import Sessions, Sink

FeedbackHandler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Takes the body of a feedback request and returns the body of the response."""


def create_app(
    policies: Policy | Mapping[str, Policy],
    sink: Sink | None = None,
    settings: ServeConfig | None = None,
    *,
    token: str | None = None,
    feedback_token: str | None = None,
    answered: Iterable[str] = (),
    feedback: FeedbackHandler | None = None,
    metrics: ServingMetrics | None = None,
    sessions: Sessions | None = None,
    check: Callable[[], None] | None = None,
) -> FastAPI:
    """Return an application that answers with policies and records its answers.

    A single policy answers to any model name, several policies only to their own. The turns in
    `app.state.sessions` become rows, which go to `sink`. `feedback` handles `POST /feedback`, which
    requires `feedback_token` if one is given. `check` raises RequestError while nothing can be
    recorded. Requests whose response names are in `answered` are not answered again.
    """
    chosen = settings or ServeConfig()
    kept = new_sessions(sink, chosen) if sessions is None else sessions
    numbers = metrics or ServingMetrics()
    serving = Serving(policies, kept, chosen, numbers, check or (lambda: None), answered=answered)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ends = asyncio.create_task(serving.sweep())
        yield
        ends.cancel()
        await kept.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.sessions, app.state.serving, app.state.metrics = kept, serving, numbers
    _routes(app, serving, feedback)
    _errors(app)
    app.add_middleware(
        Guard,
        token=token,
        feedback_token=feedback_token,
        limits=chosen.limits,
        refused=lambda status: numbers.refused.labels(str(status)).inc(),
    )
    return app


def new_sessions(sink: Sink | None, settings: ServeConfig) -> Sessions:
    """Return sessions with the limits of a configuration."""
    return Sessions(
        sink,
        session_bytes=settings.limits.session_bytes,
        all_bytes=settings.limits.all_sessions_bytes,
        idle_seconds=settings.session_idle_timeout,
        longest_seconds=settings.session_max_age,
    )


def _routes(app: FastAPI, serving: Serving, feedback: FeedbackHandler | None) -> None:
    @app.post("/v1/chat/completions")
    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def chat(request: Request, session_id: str | None = None) -> Response:
        return await serving.answer(CHAT, request, session_id)

    @app.post("/v1/completions")
    @app.post("/sessions/{session_id}/v1/completions")
    async def complete(request: Request, session_id: str | None = None) -> Response:
        return await serving.answer(COMPLETIONS, request, session_id)

    @app.post("/v1/responses")
    @app.post("/sessions/{session_id}/v1/responses")
    async def respond(request: Request, session_id: str | None = None) -> Response:
        return await serving.answer(RESPONSES, request, session_id)

    @app.get("/v1/models")
    @app.get("/sessions/{session_id}/v1/models")
    async def models(session_id: str | None = None) -> Response:
        data = [about(name) for name in serving.policies]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        serving.policy(name)
        return JSONResponse(about(name))

    @app.delete("/sessions/{session_id}")
    async def end(session_id: str) -> Response:
        ended = await serving.sessions.end(session_id)
        return JSONResponse({"session_id": session_id, "turns": len(ended.turns) if ended else 0})

    @app.post(FEEDBACK_PATH)
    async def rate(request: Request) -> Response:
        if feedback is None:
            raise RequestError("this server takes no feedback", status=404)
        body = form.parse(await serving.body(request))
        if body.get("feedback_id") is None:
            body["feedback_id"] = of_header(request.headers, "Idempotency-Key")
        return await serving.measured("feedback", _json(feedback(body)))

    @app.get("/health")
    async def health() -> Response:
        serving.check()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        serving.gauge()
        return Response(serving.metrics.text(), media_type=CONTENT_TYPE)


async def _json(body: Awaitable[dict[str, Any]]) -> Response:
    return JSONResponse(await body)


def _errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.url.path:.200}"
        return RequestError(message, status=error.status_code).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return RequestError("the server failed; its log says why", status=500).response()
