import asyncio
from typing import Any

import pytest

from rlake.loop.studio.access import Access, hosts_of

HERE = {"host": "127.0.0.1:8012"}


def ask(
    headers: dict[str, str],
    *,
    query: str = "",
    kind: str = "http",
    method: str = "GET",
    host: str = "127.0.0.1",
    token: str | None = None,
) -> tuple[int | str, dict[str, str]]:
    """Return status and headers of an answer; 200 "inside" where the request was passed on."""
    sent: list[dict[str, Any]] = []

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": kind,
        "method": method,
        "path": "/sql",
        "query_string": query.encode(),
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }
    guard = Access(inside, admits=hosts_of(host), token=token, cookie="kept")
    asyncio.run(guard(scope, None, send))
    first = sent[0]
    answered = {k.decode(): v.decode() for k, v in first.get("headers", ())}
    return first.get("status", first["type"]), answered


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:9", "127.0.0.9:80"])
def test_this_machine_is_admitted_by_its_names(host: str) -> None:
    status, headers = ask({"host": host})
    assert status == 299
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "default-src 'self'" in headers["content-security-policy"]


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_another_host_is_refused(kind: str) -> None:
    refused = 421 if kind == "http" else "websocket.close"
    assert ask({"host": "evil.example"}, kind=kind)[0] == refused
    assert ask({}, kind=kind)[0] == refused


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:9", "null"])
def test_another_origin_is_refused(kind: str, origin: str) -> None:
    refused = 403 if kind == "http" else "websocket.close"
    assert ask(HERE | {"origin": origin}, kind=kind)[0] == refused
    assert ask(HERE | {"origin": "http://127.0.0.1:8012"}, kind=kind)[0] == 299


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_starts_no_query(site: str) -> None:
    """An image or a frame is refused; a link opens a page, and asks before it runs a query."""
    sent = HERE | {"sec-fetch-site": site, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    assert ask(sent)[0] == 403
    link = sent | {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert ask(link)[0] == 299
    assert ask(link, query="q=SELECT+1")[0] == 200  # the page that asks, not the one inside
    assert ask(link, query="q=SELECT+1", method="POST")[0] == 403
    assert ask(link | {"sec-fetch-dest": "iframe"})[0] == 403
    assert ask(link | {"sec-fetch-site": "same-origin"}, query="q=SELECT+1")[0] == 299


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_elsewhere_a_token_is_required(kind: str) -> None:
    there = {"host": "box:8012"}

    def status(headers: dict[str, str], query: str = "") -> Any:
        return ask(headers, query=query, kind=kind, host="box", token="secret")

    refused = 403 if kind == "http" else "websocket.close"
    assert status(there)[0] == refused
    assert status(there, "token=wrong")[0] == refused
    assert status(there | {"cookie": "kept=wr\xf6ng"})[0] == refused
    assert status(there | {"cookie": "kept=secret"})[0] == 299
    if kind == "http":
        code, headers = status(there, "token=secret&q=1")
        assert (code, headers["location"]) == (303, "/sql?q=1")
        assert headers["set-cookie"].startswith("kept=secret; HttpOnly; SameSite=Lax")


@pytest.mark.parametrize(("kind", "method"), [("http", "POST"), ("websocket", "GET")])
def test_a_token_does_not_admit_another_origin_without_tls(kind: str, method: str) -> None:
    """On plain HTTP browsers send no `Sec-Fetch-Site`, and `Origin` with these alone."""
    there = {"host": "box:8012", "cookie": "kept=secret"}
    given: dict[str, Any] = {"kind": kind, "method": method, "host": "box", "token": "secret"}
    refused = 403 if kind == "http" else "websocket.close"
    for other in ("http://evil.example", "http://box:9", "http://box", "null"):
        assert ask(there | {"origin": other}, **given)[0] == refused
        assert ask(there | {"origin": other}, query="token=secret", **given)[0] == refused
    assert ask(there | {"origin": "http://box:8012"}, **given)[0] == 299
