"""How far the explorer may run ahead: which weights its next batch is to be sampled with.

Explorer batch after batch feeds training step after training step. Whoever knows the rows stored
so far can say which step will draw the next one, and so which weights it may be sampled with: the
newest published ones that are at most `max_ahead` steps old by then. That makes the weights of
every row a function of the rows before it, not of who was faster, in one process or in two.
"""

from collections import deque
from collections.abc import Callable, Iterable

from ..config import ScheduleConfig


class Pacer:
    """Follows the units (groups or rows) that are stored, as the trainer takes up new ones."""

    def __init__(self, schedule: ScheduleConfig, *, new_units: Callable[[int], int]) -> None:
        """Follow a trainer whose step s takes up `new_units(s)` units that no step knew before."""
        self._schedule, self._new_units = schedule, new_units
        self._waiting: deque[int] = deque()
        self.step = 1
        """The training step that will take up the next unit."""
        self._advance()

    def stored(self, versions: Iterable[int]) -> None:
        """Note units that may be trained on, by the version of their oldest row, in order."""
        for version in versions:
            self._waiting.append(version)
            self._advance()

    def _advance(self) -> None:
        """Let the trainer take steps while all that they need is there, and fresh."""
        while len(self._waiting) >= (need := self._new_units(self.step)):
            oldest = self.step - 1 - self._schedule.lag
            self._waiting = deque(v for v in self._waiting if v >= oldest)
            if len(self._waiting) < need:
                return
            for _ in range(need):
                self._waiting.popleft()
            self.step += 1

    def admits(self, under_way: int, newest: int) -> bool:
        """Tell whether one more unit may be begun with the weights of version `newest`.

        It is taken up behind the units that wait and those under way; by then these weights may be
        `max_ahead` steps old.
        """
        step, left = self.step, len(self._waiting) + under_way
        while left >= (need := self._new_units(step)):
            left -= need
            step += 1
        return step - 1 - self._schedule.max_ahead <= newest

    @property
    def version(self) -> int:
        """The policy version that the next batch is sampled with."""
        ahead = max(0, self.step - 1 - self._schedule.max_ahead)
        return ahead - ahead % self._schedule.publish_every
