"""The labeling form in a browser: one page and its requests."""

import hmac
import json
import secrets
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse

from ...store import Store
from ...store.errors import RlakeError
from ...store.records import proper
from .queue import Queue, cut, progress, shown

BODY_BYTES = 64 << 10
"""Most bytes of a request body."""
_LONGEST_NAME = 80
_SHOWN = 100_000
"""Most characters of a text to send."""
_POLICY = (
    "default-src 'none'; style-src 'nonce-{0}'; script-src 'nonce-{0}'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def app(
    store: Store,
    queue: Queue,
    *,
    hosts: tuple[str, ...] | None,
    token: str | None = None,
    annotator: str | None = None,
) -> FastAPI:
    """Return the application that serves the form; `annotator` is the suggested name.

    Only requests to a host in `hosts` are answered, which prevents DNS rebinding; None: any host.
    The page's requests carry a key that only the page knows. With a `token`, the page itself
    requires it.
    """
    served = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    key = secrets.token_urlsafe(24)

    @served.middleware("http")
    async def guarded(request: Request, call_next: Any) -> Response:
        host = (request.headers.get("host") or "").rpartition(":")[0] or request.headers.get("host")
        if hosts is not None and host not in hosts:
            return _refused(421, f"this form is not served as `{host}`")
        given = request.query_params.get("token") or ""
        shown_key = request.headers.get("x-rlake-key") or ""
        # `compare_digest` raises TypeError for other texts
        if not (given + shown_key).isascii():
            return _refused(400, "a token or key must be ASCII")
        if request.url.path == "/":
            if token is not None and not hmac.compare_digest(given, token):
                return _refused(403, "the address lacks its token")
        elif not hmac.compare_digest(shown_key, key):
            return _refused(403, "this request does not come from the page")
        return await call_next(request)

    @served.get("/")
    def form() -> Response:
        nonce = secrets.token_urlsafe(12)
        html = files(__package__ or "").joinpath("page.html").read_text(encoding="utf-8")
        message = {
            "key": key,
            "queue": queue.name,
            "annotator": annotator,
            "question": queue.question.text,
            "labels": [c.label for c in queue.question.choices],
        }
        # or a label with `</script>` would end the script
        text = json.dumps(message).replace("<", "\\u003c")
        headers = {
            "Content-Security-Policy": _POLICY.format(nonce),
            "Referrer-Policy": "no-referrer",
            "X-Frame-Options": "DENY",
        }
        return HTMLResponse(
            html.replace("{{nonce}}", nonce).replace("{{settings}}", text), headers=headers
        )

    @served.get("/item")
    def item(annotator: str, key: str | None = None) -> Response:
        return _answered(lambda: _next(store, queue, _name(annotator), key))

    @served.post("/label")
    async def label(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return _refused(413, f"a request has at most {BODY_BYTES:,} bytes")
        return await run_in_threadpool(lambda: _answered(lambda: _add(store, queue, body)))

    return served


def _next(store: Store, queue: Queue, annotator: str, key: str | None) -> dict[str, Any]:
    item = queue.named(key) if key else queue.next(store, annotator)
    message: dict[str, Any] = {"progress": vars(progress(queue, store, annotator)), "item": None}
    if item is None:
        return message
    texts = shown(store, item).items()
    cut_ = {name: text if text is None else cut(str(text), _SHOWN) for name, text in texts}
    return message | {"item": {"key": item.key} | cut_}


def _add(store: Store, queue: Queue, body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
        annotator, key = _name(given["annotator"]), str(given["key"])
        label, comment = given.get("label"), proper(str(given.get("comment") or ""))
    except RecursionError:
        raise _WrongRequest("the request's JSON is nested too deep") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _WrongRequest(f"expected annotator, key, label and comment: {error}") from error
    choice = None if label is None else queue.question.choice(str(label))
    queue.add(store, queue.named(key), annotator, choice, comment=comment)
    return {"stored": True}


class _WrongRequest(RlakeError):
    """A request that the page would not send."""


def _name(annotator: object) -> str:
    name = str(annotator).strip()
    if not name or len(name) > _LONGEST_NAME or proper(name) != name:
        raise _WrongRequest(f"an annotator's name has 1 to {_LONGEST_NAME} valid characters")
    return name


def _answered(answer: Any) -> Response:
    try:
        return JSONResponse(answer())
    except RlakeError as error:  # what the annotator can fix
        return _refused(400, str(error))


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": proper(why)}, status_code=status)


async def _body(request: Request) -> bytes | None:
    parts, size = [], 0
    # counted while it is read: a `content-length` may be missing, or wrong
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)
