"""What several browsers watch is read once, and told to each."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from nicegui import Client, ui

from rlake.loop.studio import live
from rlake.loop.studio.frame import Studio
from rlake.loop.studio.live import Channel, Message
from rlake.loop.studio.pages import run as run_page
from rlake.loop.studio.queries import Queries
from rlake.loop.studio.run_control import RunControl
from rlake.store import Store
from rlake.store.errors import StoreError


class _Steps:
    """A source that tells a number, each once; `failing` is how often it fails before."""

    def __init__(self, *, failing: int = 0) -> None:
        self.asked, self.failing = 0, failing

    async def news(self) -> Message:
        self.asked += 1
        if self.asked <= self.failing:
            raise StoreError("cannot open table `metrics`")
        return {"step": self.asked} if self.asked % 2 else {}

    def whole(self) -> Message:
        return {"step": self.asked, "whole": True} if self.asked > self.failing else {}


def watched(source: _Steps, watch: Callable[[Channel], Awaitable[None]]) -> None:
    async def run() -> None:
        channel = Channel(source)
        try:
            await asyncio.wait_for(watch(channel), 30)  # rounds take milliseconds
        finally:
            channel.task.cancel()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SECONDS", 0.001)


def test_twenty_browsers_cost_as_many_reads_as_one_and_a_late_one_gets_all() -> None:
    source = _Steps()

    async def watch(channel: Channel) -> None:
        first = channel.enter()
        assert json.loads(await first.get() or "")["step"] == 1
        known = source.asked
        queues = [channel.enter() for _ in range(20)]
        told = [json.loads(await queue.get() or "") for queue in queues]
        assert told == [{"step": known, "whole": True}] * 20
        late = channel.enter()
        assert json.loads(await late.get() or "")["whole"]
        following = {"step": known + 1 + known % 2}  # every second one is told
        assert [json.loads(await queue.get() or "") for queue in queues] == [following] * 20
        assert source.asked < 20

    watched(source, watch)


def test_an_error_is_told_once_and_taken_back_when_the_store_is_there_again() -> None:
    async def watch(channel: Channel) -> None:
        queue = channel.enter()
        told = [json.loads(await queue.get() or "") for _ in range(3)]
        assert told == [
            {"error": "cannot open table `metrics`"},
            {"error": "", "step": 5},
            {"step": 7},
        ]

    watched(_Steps(failing=4), watch)


def test_a_browser_that_falls_behind_is_cut_off_and_the_others_go_on() -> None:
    async def watch(channel: Channel) -> None:
        slow, quick = channel.enter(), channel.enter()
        for _ in range(100):
            await quick.get()
        assert slow.get_nowait() is None

    watched(_Steps(), watch)


def test_points_are_told_once_however_slow_or_broken_the_state_of_their_run_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    metric = {"run_id": "r", "attempt": 1, "job": "train", "name": "train/kl", "value": 0.5}
    store.append("metrics", [metric | {"step": 1}])
    queries = Queries(store)
    studio = Studio(
        store, queries, control=RunControl(store, can_write=False), can_write=False, name="lake"
    )
    slow, answers = asyncio.Event(), [StoreError("is restored"), []]

    async def state(*_: object) -> list[dict[str, object]]:
        await slow.wait()
        if isinstance(answer := answers.pop(0), StoreError):
            raise answer
        return answer

    monkeypatch.setattr(run_page, "runs", state)
    monkeypatch.setattr(run_page, "_ROW_SECONDS", 0.01)

    async def watch() -> None:
        source = live.WATCHED["/run/live"](studio, {"id": "r", "metrics": "train/kl"})
        assert await source.news() == {"points": {"train/kl": [(1.0, 0.5)]}, "whole": True}
        store.append("metrics", [metric | {"step": 2}])
        slow.set()
        monkeypatch.setattr(run_page, "_ROW_SECONDS", 10)
        with pytest.raises(StoreError):
            await source.news()
        assert await source.news() == {"points": {"train/kl": [(2.0, 0.5)]}, "whole": False}

    asyncio.run(asyncio.wait_for(watch(), 30))  # bounded: each read takes milliseconds
    queries.close()


def test_a_redraw_that_fails_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def redraw() -> None:
        raise StoreError("is restored")

    told: list[object] = []
    monkeypatch.setattr(live, "notify_error", told.append)
    monkeypatch.setattr(live.Watch, "run_method", lambda _, *called: told.append(called[0]))
    with Client(ui.page("/watched")):
        watch = live.Watch("/run/live", redraw)
    asyncio.run(watch.redraw())
    assert [str(one) for one in told] == ["is restored", "again"]
