"""Pacing: how far the explorer may run ahead, and with which weights it samples its next batch.

The rows stored so far determine which training step will draw the next row, and so the weights to
sample it with: the newest published ones that satisfy `newest >= step - 1 - max_ahead`. The weights
of every row are thus a function of the rows before it, and not of the speed of either job.
"""

from collections import deque
from collections.abc import Callable, Iterable

from ..config import ScheduleConfig


def is_published(schedule: ScheduleConfig, step: int) -> bool:
    """Return whether explorers get the weights of a step."""
    return step % schedule.publish_every == 0


class Pacer:
    """Counts the units (groups or rows) that are stored, and the steps that will use them."""

    def __init__(self, schedule: ScheduleConfig, *, new_units: Callable[[int], int]) -> None:
        """Pace a trainer whose step s is the first to use `new_units(s)` units."""
        self._schedule, self._new_units = schedule, new_units
        self._waiting: deque[int] = deque()
        self.step = 1
        """The training step that will use the next unit."""
        self._advance()

    def stored(self, versions: Iterable[int]) -> None:
        """Count units that may be trained on, by the versions of their oldest rows, in order."""
        for version in versions:
            self._waiting.append(version)
            self._advance()

    def _advance(self) -> None:
        while len(self._waiting) >= (need := self._new_units(self.step)):
            # Only now: whether a unit is stale depends on the step that would draw it.
            oldest = self.step - 1 - self._schedule.lag
            self._waiting = deque(v for v in self._waiting if v >= oldest)
            if len(self._waiting) < need:
                return
            for _ in range(need):
                self._waiting.popleft()
            self.step += 1

    def admits(self, under_way: int, newest: int) -> bool:
        """Return whether one more unit may start with the weights of version `newest`.

        It will be used after the units that wait and those under way; by then these weights may be
        at most `max_ahead` steps old.
        """
        step, left = self.step, len(self._waiting) + under_way
        while left >= (need := self._new_units(step)):
            left -= need
            step += 1
        return step - 1 - self._schedule.max_ahead <= newest

    @property
    def version(self) -> int:
        """The policy version with which the next batch is sampled."""
        ahead = max(0, self.step - 1 - self._schedule.max_ahead)
        # Only multiples of it are published.
        return ahead - ahead % self._schedule.publish_every
