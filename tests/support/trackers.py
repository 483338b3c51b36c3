"""Experiment trackers of a user: one that works, and some that do not."""

import threading
from collections.abc import Mapping
from typing import Any

from rlake.loop.runs.tracker import Tracked

TOLD: list[tuple[Any, ...]] = []


class Notes:
    """A tracker of a user's: remembers what it was told."""

    def __init__(self, *, title: str = "notes") -> None:
        self.title = title

    def start(self, run: Tracked) -> None:
        TOLD.append(("start", self.title, run.name, run.start_step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        TOLD.append(("log", self.title, step, dict(values)))

    def fail(self, error: str) -> None:
        TOLD.append(("fail", self.title, error))

    def close(self) -> None:
        TOLD.append(("close", self.title))


class Down:
    """A tracker whose server is down."""

    def start(self, run: Tracked) -> None:
        raise ConnectionError("no server at http://tracker")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise AssertionError("it was never started")

    def close(self) -> None:
        raise AssertionError("it was never started")


class Hangs(Notes):
    """A tracker that never answers."""

    def start(self, run: Tracked) -> None:
        threading.Event().wait()


class Flaky(Notes):
    """A tracker that refuses each call but every third."""

    calls = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        if self.calls % 3:
            raise TimeoutError("try again")
        super().log(step, values)
