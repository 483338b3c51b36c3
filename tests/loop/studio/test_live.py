"""What several browsers watch is read once, and told to each."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from rlake.loop.studio import live
from rlake.loop.studio.live import Channel, Message
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
        queues = [channel.enter() for _ in range(20)]
        told = [json.loads(await queue.get() or "") for queue in queues]
        assert told == [{"step": 1, "whole": True}] * 20
        late = channel.enter()
        assert json.loads(await late.get() or "")["whole"]
        assert [json.loads(await queue.get() or "") for queue in queues] == [{"step": 3}] * 20
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
