"""Who may reach the application: hosts, origins and the token, before a page is built."""

import hmac
from collections.abc import Callable
from html import escape
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from ...operators.endpoint import is_loopback

Scope = dict[str, Any]
_HEADERS = {
    # `eval` is how NiceGUI reads the options of grids; inline scripts are how it starts a page.
    "content-security-policy": "default-src 'self'; img-src 'self' data:; font-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
"""Sent with each answer: pages load nothing from other hosts, and no other page may frame them."""
_ELSEWHERE = (
    '<!doctype html><meta charset="utf-8"><title>rlake studio</title>'
    '<body style="font:16px system-ui;margin:4rem;color-scheme:light dark">'
    "<p>A page of another site opened this address, which runs a query:</p>"
    '<p><a href="{0}">{0}</a></p>'
)


class Access:
    """The outermost ASGI middleware of the studio, for HTTP and for the websocket.

    Only hosts for which `admits` is true are served, which prevents DNS rebinding. What a page of
    another origin sends is refused; a link there may open a page of ours, which then asks before
    it runs a query of the address. With a token, the first address names it, and a cookie keeps it.
    """

    def __init__(
        self, app: Any, *, admits: Callable[[str], bool], token: str | None, cookie: str
    ) -> None:
        self.app = app
        self._admits, self._token, self._cookie = admits, token, cookie

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        refused = self._refusal(scope, headers)
        if refused is None:
            await self.app(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(_with_headers(send), *refused)

    def _refusal(
        self, scope: Scope, headers: dict[str, str]
    ) -> tuple[int, str, dict[str, str]] | None:
        """Return status, text and headers of the answer to a request that is not passed on."""
        host = headers.get("host", "")
        name = (host if host.endswith("]") else host.rpartition(":")[0] or host).strip("[]")
        if not self._admits(name):
            return 421, f"the studio is not served as `{name:.100}`", {}
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "this request comes from a page of another origin", {}
        query = scope.get("query_string", b"").decode("latin-1")
        given = dict(parse_qsl(query)).get("token")
        if self._token is not None and not self._knows(given, headers):
            return (403, "the address lacks its token; open the one that its command printed", {})
        rest = urlencode(
            [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] != "token"]
        )
        address = scope["path"] + (f"?{rest}" if rest else "")
        if self._token is not None and given is not None and scope["type"] == "http":
            kept = f"{self._cookie}={self._token}; HttpOnly; SameSite=Lax; Path=/"
            # so that the token stays neither in the address bar nor in links that people copy
            return 303, "", {"location": address, "set-cookie": kept}
        if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            return None
        is_link = headers.get("sec-fetch-mode") == "navigate"
        is_link = is_link and headers.get("sec-fetch-dest") == "document"
        if not is_link or scope.get("method") != "GET":
            return 403, "this request comes from a page of another origin", {}
        if not query:
            return None
        text = _ELSEWHERE.format(escape(address))
        return 200, text, {"content-type": "text/html; charset=utf-8"}

    def _knows(self, given: str | None, headers: dict[str, str]) -> bool:
        try:
            kept = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            kept = None
        token = (self._token or "").encode()
        shown = (given, kept.value if kept else None)
        # constant time, so that timing does not reveal the token
        return any(hmac.compare_digest(one.encode(), token) for one in shown if one)


def _with_headers(send: Any) -> Any:
    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            more = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return sending


async def _answer(send: Any, status: int, text: str, headers: dict[str, str]) -> None:
    headers = {"content-type": "text/plain; charset=utf-8"} | headers
    pairs = [(k.encode(), v.encode()) for k, v in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": text.encode()})


def hosts_of(host: str) -> Callable[[str], bool]:
    """Return which names a server that listens at `host` is reached by.

    >>> hosts_of("127.0.0.1")("localhost"), hosts_of("127.0.0.1")("evil.example")
    (True, False)
    """
    if host in ("0.0.0.0", "::"):  # every interface, and this machine may have any name
        return lambda name: True
    return lambda name: is_loopback(name) or (not is_loopback(host) and name == host)
