"""The application: OpenAI's chat and models API over policies, with everything recorded."""

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
from .header_values import of_header
from .limits import FEEDBACK_PATH, Guard, headers_of
from .metrics import CONTENT_TYPE, ServingMetrics
from .sessions import Sessions, Sink

Told = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Takes the body of a request, and returns that of its answer."""


def create_app(
    policies: Policy | Mapping[str, Policy],
    sink: Sink | None = None,
    settings: ServeConfig | None = None,
    *,
    token: str | None = None,
    feedback_token: str | None = None,
    answered: Iterable[str] = (),
    feedback: Told | None = None,
    metrics: ServingMetrics | None = None,
    sessions: Sessions | None = None,
    check: Callable[[], None] | None = None,
) -> FastAPI:
    """Return an application that answers with policies, and records what it answered.

    One policy answers to any model's name, several to their own. `app.state.sessions` are its
    Sessions: their turns are what rows are made of. `sink` is where they go. `feedback` answers
    `POST /feedback`, for the bearer of `feedback_token` alone where there is one; `check` raises
    RequestError while nothing can be recorded. Requests with the names of answers that are
    `answered` are not answered again.
    """
    chosen = settings or ServeConfig()
    limits = chosen.limits
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
        limits=limits,
        refused=lambda status: numbers.refused.labels(str(status)).inc(),
    )
    return app


def new_sessions(sink: Sink | None, settings: ServeConfig) -> Sessions:
    """Return sessions that are bounded as a configuration says."""
    return Sessions(
        sink,
        session_bytes=settings.limits.session_bytes,
        all_bytes=settings.limits.all_sessions_bytes,
        idle_seconds=settings.session_idle_timeout,
        longest_seconds=settings.session_max_age,
    )


def _routes(app: FastAPI, serving: Serving, feedback: Told | None) -> None:
    @app.post("/v1/chat/completions")
    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def chat(request: Request, session_id: str | None = None) -> Response:
        return await serving.measured("chat", serving.chat(request, session_id))

    @app.get("/v1/models")
    @app.get("/sessions/{session_id}/v1/models")
    async def models(session_id: str | None = None) -> Response:
        return JSONResponse({"object": "list", "data": serving.models()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        serving.policy(name)
        return JSONResponse(about(name))

    @app.delete("/sessions/{session_id}")
    async def end(session_id: str) -> Response:
        ended = await serving.sessions.end(session_id)
        turns = 0 if ended is None else len(ended.turns)
        return JSONResponse({"session_id": session_id, "turns": turns})

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


async def _json(told: Awaitable[dict[str, Any]]) -> Response:
    return JSONResponse(await told)


def _errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return JSONResponse(error.body, error.status, headers=headers_of(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = RequestError(f"{error.detail}: {request.url.path:.200}", status=error.status_code)
        return JSONResponse(message.body, error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        message = RequestError("the server failed; its log says why", status=500)
        return JSONResponse(message.body, 500)
