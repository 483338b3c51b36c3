"""Pages while the store is restored between two of their reads: they say what is gone."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from nicegui import Client, core, ui
from nicegui.element import Element

import rlake
from rlake.loop.labeling import Choice, Item, Question, Queue
from rlake.loop.studio import pages  # noqa: F401  each page adds itself
from rlake.loop.studio.frame import PAGES, Studio, View
from rlake.loop.studio.queries import Queries
from rlake.loop.studio.run_control import RunControl
from rlake.store import Store
from rlake.store.errors import RlakeError

T = TypeVar("T")
RUN = "grpo_digits"
SECONDS = 60
NEVER = -1


@dataclass(eq=False)
class Restored(View):
    """A look at a page during which the store becomes empty before the read of this number."""

    at: int = 0
    reads: int = 0
    drawn: "list[asyncio.Future[None]]" = field(default_factory=list)

    async def wait(self, work: Awaitable[T]) -> T:
        if self.reads == self.at:
            self.store.restore("empty")
            self.studio.queries.wrote()
        self.reads += 1
        return await super().wait(work)

    def draw(
        self, place: Element, read_and_draw: Callable[[], Awaitable[None]]
    ) -> "asyncio.Future[None]":
        async def drawn() -> None:
            with place:
                await told(read_and_draw)

        self.drawn.append(asyncio.ensure_future(drawn()))
        return self.drawn[-1]


async def told(read_and_draw: Callable[[], Awaitable[None]]) -> str:
    """What the frame shows of an error that says what is wrong; others are faults of a page."""
    try:
        await read_and_draw()
    except RlakeError as error:
        return str(error)
    return ""


@pytest.fixture
def lake(finished_run: Path, tmp_path: Path) -> Store:
    """A store with the snapshot `full`, of a run, and `empty`."""
    copytree(finished_run, tmp_path / "lake")
    store = rlake.connect(tmp_path / "lake")
    key = store.sql("SELECT min(experience_id) FROM experiences").fetchall()[0][0]
    good = Choice("good", 1.0)
    queue = Queue("review", Question("Good?", (good,)), (Item(key),))
    queue.add(store, queue.items[0], "ann", good, comment="")
    store.snapshot("full")
    for name in ("experiences", "tasks", "draws", "metrics", "policies", "feedback", "job_events"):
        store.open_at(name, 1).restore()
    store.snapshot("empty")
    return store


def addresses(store: Store) -> list[str]:
    """Addresses of the pages that read several times."""
    store.restore("full")
    found = store.sql(
        "SELECT min(experience_id), max(experience_id) FROM experiences WHERE group_id = "
        "(SELECT min(group_id) FROM experiences)"
    ).fetchall()
    one, other = (quote(name) for name in found[0])
    return [
        f"/rollout?id={one}",
        f"/rollout?id={one}&with={other}",
        f"/lineage?experience={one}",
        f"/lineage?run={RUN}",
        f"/run?id={RUN}",
        f"/runs?compare={RUN},{RUN}",
        "/runs",
        "/rollouts",
        "/tasks",
        f"/audits?run={RUN}",
        "/curriculum",
        "/rewards",
        "/label",
        "/pipelines",
    ]


async def opened(studio: Studio, address: str, at: int) -> tuple[int, str]:
    """Open a page of a full store; return how often it read, and what it said of an error."""
    studio.store.restore("full")
    studio.queries.wrote()
    parts = urlsplit(address)
    [page] = [one for one in PAGES if one.path == parts.path]
    with Client(ui.page(parts.path)) as client, ui.element("main"):
        view = Restored(studio, page, dict(parse_qsl(parts.query)), client, at=at)
        said = await told(lambda: page.fill(view))
        await asyncio.gather(*view.drawn)
    return view.reads, said


def test_a_row_that_vanishes_between_two_reads_of_a_page_is_no_fault_of_it(
    lake: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_all() -> None:
        monkeypatch.setattr(core, "loop", asyncio.get_running_loop())  # as its server sets it
        queries = Queries(lake)
        studio = Studio(lake, queries, True, RunControl(lake, can_write=True), "lake")  # noqa: FBT003
        for address in addresses(lake):
            reads, said = await opened(studio, address, NEVER)
            assert (reads > 0, said) == (True, ""), address
            for at in range(reads):
                try:
                    errors[address, at] = (await opened(studio, address, at))[1]
                except Exception as error:  # noqa: BLE001  all pages are looked at
                    failed[address, at] = error
        queries.close()

    errors: dict[tuple[str, int], str] = {}
    failed: dict[tuple[str, int], Exception] = {}
    asyncio.run(asyncio.wait_for(open_all(), SECONDS))
    assert failed == {}
    said = {error for (address, _), error in errors.items() if address.startswith("/rollout?")}
    assert any("is no longer in this store" in error for error in said)
