"""The studio's server: one application over one store, in this process."""

import multiprocessing
import secrets
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.resources import files
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse
from nicegui import ui
from starlette.middleware.gzip import GZipMiddleware

from ...operators.endpoint import is_loopback
from ...store import Store, interrupts
from ..chat_api.limits import listen
from ..labeling import Queue
from . import pages  # noqa: F401 - each page adds itself
from .access import Access, hosts_of
from .frame import ANSWERS, LABELS, PAGES, START, Page, Studio, answered, build
from .live import WATCHED, Channels
from .queries import Queries
from .run_control import RunControl

_RECONNECT_SECONDS = 3.0
"""How long a browser may be away before what it asked for is cancelled, in seconds."""


class _Server(uvicorn.Server):
    """A server that leaves signals to the program, which ends at once."""

    def capture_signals(self) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return nullcontext()


def serve(
    store: Store,
    *,
    host: str,
    port: int,
    name: str,
    ready: Callable[[str], None],
    can_write: bool = False,
    queue: Queue | None = None,
    annotator: str = "",
) -> None:
    """Serve the pages until a signal ends the process; `ready` receives the address.

    With a `queue`, only the page that labels its items is served. Without loopback, the address has
    a token. Raises ConfigError for an address that is not free.
    """
    is_ours = is_loopback(host)
    token = None if is_ours else secrets.token_urlsafe(24)
    with listen(host, port) as listening, interrupts.at_once():
        # NiceGUI chooses `fork`, by which a process may hang while tables are open
        multiprocessing.set_start_method("spawn", force=True)
        port = listening.getsockname()[1]
        cookie = f"rlake_studio_{port}"  # cookies of a host are shared by all its ports
        control = RunControl(store, can_write=can_write)
        studio = Studio(store, Queries(store), can_write, control, name, queue, annotator)
        app = application(studio, compressed=not is_ours)
        access = Access(app, admits=hosts_of(host), token=token, cookie=cookie)
        config = uvicorn.Config(
            access,
            loop="asyncio",  # uvloop would take the signals, by which the program ends
            log_level="warning",
            lifespan="on",
            ws_per_message_deflate=not is_ours,
        )
        server = _Server(config)
        ready(_address(host, port, token))
        server.run(sockets=[listening])


def _address(host: str, port: int, token: str | None) -> str:
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def application(studio: Studio, *, compressed: bool) -> FastAPI:
    """Return the application; NiceGUI has one for each process, so this is called once."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    is_whole = studio.queue is None
    app.add_api_route("/", lambda: RedirectResponse(START if is_whole else LABELS))
    for path in ANSWERS if is_whole else ():
        app.add_api_route(path, _asked(studio, path))
    channels = Channels(studio)
    for path in WATCHED if is_whole else ():
        app.add_api_websocket_route(path, channels.serve)
    for one in PAGES if is_whole else [one for one in PAGES if one.path == LABELS]:
        ui.page(one.path, title=one.title, response_timeout=20)(_shown(studio, one))
    style = files(__package__ or "").joinpath("studio.css").read_text(encoding="utf-8")
    ui.add_head_html(f"<style>{style}</style>", shared=True)
    ui.run_with(
        app,
        title="rlake studio",
        dark=None,  # as the system has it
        tailwind=False,
        binding_refresh_interval=None,
        reconnect_timeout=_RECONNECT_SECONDS,
        gzip_middleware_factory=GZipMiddleware if compressed else None,
        show_welcome_message=False,
    )
    return app


def _shown(studio: Studio, one: Page) -> Callable[[Request], Any]:
    async def show(request: Request) -> None:
        await build(studio, one, request)

    return show


def _asked(studio: Studio, path: str) -> Callable[[Request], Any]:
    async def ask(request: Request) -> Any:
        return await answered(studio, path, request)

    return ask
