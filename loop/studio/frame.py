"""What all pages share: how a page is declared, its frame, and what it is given to read with."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import urlencode

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from nicegui import background_tasks, ui
from nicegui.client import Client

from ...store import Store
from ...store.errors import NotFoundError, RlakeError
from ..labeling import Queue
from .queries import MAX_ROWS, SECONDS, Queries, Rows
from .run_control import RunControl

T = TypeVar("T")
_log = logging.getLogger(__name__)
_AT_ONCE_SECONDS = 0.5
"""How long a page may take to be sent whole, in seconds; the rest of it follows when it is done."""
_GONE_SECONDS = 0.25
"""How often it is looked whether the browser that asked is still there, in seconds."""


@dataclass(frozen=True)
class Studio:
    """What the pages of one server share."""

    store: Store
    queries: Queries
    can_write: bool
    control: RunControl
    name: str
    """What the store is called in the header."""
    queue: Queue | None = None
    """What `rlake label --web` serves: the only page is then that for its labels."""
    annotator: str = ""
    """The suggested name of who labels."""


@dataclass(frozen=True)
class Page:
    """A page: its path, its title, and the function that fills it."""

    path: str
    title: str
    fill: "Callable[[View], Awaitable[None]]"
    section: str | None
    """Heading in the navigation; None: the page is reached from others."""
    order: int
    """Place below the heading."""


PAGES: list[Page] = []
"""All pages: importing a page's module adds it."""
START = "/runs"
"""The page that the address without a path opens."""
LABELS = "/label"
"""The page that `rlake label --web` serves alone."""
ANSWERS: "dict[str, Callable[[Studio, dict[str, str]], Awaitable[Any]]]" = {}
"""What a page's own script asks for, such as the rows of a grid: functions by their paths."""
SECTIONS = ("Runs", "Rows", "Data", "Store")
"""Headings of the navigation, in their order."""


def page(
    path: str, title: str, *, section: str | None = None, order: int = 0
) -> "Callable[[Callable[[View], Awaitable[None]]], Callable[[View], Awaitable[None]]]":
    """Declare a page. Its function draws with NiceGUI's `ui`, and gets what it reads with.

    The whole state of a page is in the query of its address (`View.params`), which can be shared.
    """

    def declare(fill: Callable[[View], Awaitable[None]]) -> Callable[[View], Awaitable[None]]:
        PAGES.append(Page(path, title, fill, section, order))
        return fill

    return declare


def answers(path: str) -> Callable[[T], T]:
    """Declare what a page's script may ask for, by `fetch`; the function returns JSON."""

    def declare(function: T) -> T:
        ANSWERS[path] = function  # pyright: ignore[reportArgumentType]
        return function

    return declare


@dataclass(eq=False)
class View:
    """One browser's look at a page: its parameters, and queries that end when it goes away."""

    studio: Studio
    page: Page
    params: dict[str, str]
    client: Client
    _tasks: set["asyncio.Future[Any]"] = field(default_factory=set)
    _drawing: dict[int, "asyncio.Future[None]"] = field(default_factory=dict)
    """By the numbers of elements, what is drawn in them."""

    @property
    def store(self) -> Store:
        """The store, at the snapshot that the server was started with."""
        return self.studio.store

    def __getitem__(self, name: str) -> str:
        """A parameter of the address, or an empty text."""
        return self.params.get(name, "")

    async def rows(
        self, sql: str, *, limit: int = MAX_ROWS, seconds: float = SECONDS, pool: str = "page"
    ) -> Rows:
        """Return the rows of a SELECT; it is cancelled when the browser goes away.

        Raises RlakeError where it cannot run or takes too long; the frame shows it.
        """
        return await self.wait(
            self.studio.queries.rows(sql, limit=limit, seconds=seconds, pool=pool)
        )

    async def query(self, sql: str, *, limit: int = MAX_ROWS) -> list[dict[str, Any]]:
        """Return the rows of a SELECT as mappings."""
        return (await self.rows(sql, limit=limit)).records()

    async def one(self, sql: str, *, absent: str) -> dict[str, Any]:
        """Return the first row of a SELECT as a mapping.

        Raises NotFoundError with the text `absent` where there is none: a page reads several
        times, and the store may be restored or rows deleted in between.
        """
        for row in await self.query(sql, limit=1):
            return row
        raise NotFoundError(absent)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return what a function of the store returns, called in a thread."""
        return await self.wait(self.studio.queries.call(function, *args))

    async def wait(self, work: Awaitable[T]) -> T:
        """Wait for work, which is cancelled when the browser goes away."""
        task = asyncio.ensure_future(work)
        self.keep(task)
        return await task

    def draw(
        self, place: ui.element, read_and_draw: Callable[[], Awaitable[None]]
    ) -> "asyncio.Future[None]":
        """Draw in an element what takes a while to read, in place of what is there or is drawn.

        Meanwhile it has a button to cancel; an error is shown there, and the rest of the page goes
        on.
        """
        if (before := self._drawing.pop(place.id, None)) is not None:
            before.cancel()
        place.clear()
        task = background_tasks.create(_drawn(place, read_and_draw), name=self.page.path)
        self._drawing[place.id] = task
        self.keep(task)
        return task

    async def write(self, function: Callable[[], T]) -> T:
        """Return what a function returns that writes, called in a thread; it is never cancelled."""
        return await self.studio.queries.keep(function)

    def keep(self, task: "asyncio.Future[Any]") -> None:
        """Cancel a task when the browser goes away."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel what the page waits for."""
        for task in list(self._tasks):
            task.cancel()

    def address(self, **changes: object) -> str:
        """Return the address of this page with other parameters; None or "" leaves one out."""
        return address(self.page.path, **{**self.params, **changes})

    def go(self, **changes: object) -> None:
        """Open this page with other parameters."""
        ui.navigate.to(self.address(**changes))

    def remember(self, **changes: object) -> None:
        """Change parameters in the address bar without loading the page again."""
        self.params |= {name: str(value or "") for name, value in changes.items()}
        ui.navigate.history.replace(self.address())


def address(path: str, **params: object) -> str:
    """Return an address of the studio.

    >>> address("/run", id="a b", step=None)
    '/run?id=a+b'
    """
    given = urlencode({k: v for k, v in params.items() if v is not None and v != ""})
    return f"{path}?{given}" if given else path


async def build(studio: Studio, page: Page, request: Request) -> None:
    """Draw a page: the navigation at once, the rest when it was read."""
    client = ui.context.client
    client.title = f"{page.title} · rlake"
    view = View(studio, page, dict(request.query_params), client)
    client.on_delete(view.close)
    _navigation(studio, page)
    task = view.draw(ui.element("main"), lambda: page.fill(view))
    await asyncio.wait({task}, timeout=_AT_ONCE_SECONDS)


async def answered(studio: Studio, path: str, request: Request) -> Any:
    """Return what a page asks for by itself; it is cancelled when the browser goes away."""
    work = asyncio.ensure_future(ANSWERS[path](studio, dict(request.query_params)))
    while not work.done():
        await asyncio.wait({work}, timeout=_GONE_SECONDS)
        if not work.done() and await request.is_disconnected():
            work.cancel()
            return Response(status_code=499)
    try:
        return work.result()
    except (RlakeError, ValueError) as error:  # ValueError: a parameter that is not a number
        return JSONResponse({"error": str(error)}, 404 if isinstance(error, NotFoundError) else 400)


async def _drawn(place: ui.element, read_and_draw: Callable[[], Awaitable[None]]) -> None:
    with place, _waiting():
        try:
            await read_and_draw()
        except RlakeError as error:
            show_error(str(error))
        except Exception as error:  # noqa: BLE001  the boundary of a page: the others go on
            _log.exception("page %s", ui.context.client.page.path)
            show_error(f"this failed with {type(error).__name__}: {error}")


@contextmanager
def _waiting() -> Iterator[None]:
    """Within the block, which waits, show that something is under way, with a button to cancel it.

    What it waits for ends as when the browser goes away; the page says that it was cancelled.
    """
    task, cancelled = asyncio.current_task(), False
    began = monotonic()

    def cancel() -> None:
        nonlocal cancelled
        if task is not None:
            cancelled = task.cancel()

    with ui.element("div").classes("waiting") as shown:
        ui.element("i")
        ui.button("Cancel", on_click=cancel).props("flat dense")
    try:
        yield
    except asyncio.CancelledError:
        if not cancelled or task is None:  # the browser went away
            raise
        task.uncancel()
        text = f"Cancelled after {monotonic() - began:.0f} s."
        ui.label(text).classes("soft").props("role=status")
    finally:
        # the browser may have gone away meanwhile, with all that was drawn for it
        if not (shown.is_deleted or shown.client.is_deleted):
            shown.delete()


def notify_error(error: RlakeError) -> None:
    """Show an error over the page, long enough to be read."""
    ui.notify(str(error), type="negative", multi_line=True, timeout=15_000)


def show_error(text: str) -> None:
    """Show an error where the page's content would be."""
    ui.label(text).classes("error").props("role=alert")


def _navigation(studio: Studio, current: Page) -> None:
    if studio.queue is not None:
        client = ui.context.client
        client.content.classes("alone")
        return
    with ui.element("nav"):
        with ui.element("a").props('href="/"').classes("brand"):
            ui.label("rlake").classes("name")
            ui.label(studio.name).classes("store")
        for section in SECTIONS:
            pages = sorted((p for p in PAGES if p.section == section), key=lambda p: p.order)
            if pages:
                ui.label(section).classes("section")
            for one in pages:
                link = ui.link(one.title, one.path)
                if one is current:
                    link.classes("current").props("aria-current=page")
        ui.element("div").classes("grow")
        mode = "writes allowed" if studio.can_write else "read only"
        ui.label(mode).classes("mode")
