"""How far the explorer may run ahead: which weights its next batch is to be sampled with.

Explorer batch after batch feeds training step after training step. Whoever knows the rows stored
so far can say which step will draw the next one, and so which weights it may be sampled with: the
newest published ones that are at most `max_ahead` steps old by then. That makes the weights of
every row a function of the rows before it, not of who was faster, in one process or in two.
"""

from collections import deque
from collections.abc import Iterable

from .config import ScheduleConfig


class Pacer:
    """Follows the units (groups or rows) that are stored, as a fifo trainer draws them."""

    def __init__(self, schedule: ScheduleConfig, *, batch_size: int) -> None:
        self._schedule, self._batch_size = schedule, batch_size
        self._waiting: deque[int] = deque()
        self.step = 1
        """The training step that will draw the next unit."""

    def stored(self, versions: Iterable[int]) -> None:
        """Note units that may be trained on, by the version of their oldest row, in order."""
        for version in versions:
            self._waiting.append(version)
            if len(self._waiting) >= self._batch_size:
                self._draw()

    def _draw(self) -> None:
        """Draw one step's units if they are all fresh; forget those that are stale."""
        oldest = self.step - 1 - self._schedule.lag
        self._waiting = deque(v for v in self._waiting if v >= oldest)
        if len(self._waiting) >= self._batch_size:
            for _ in range(self._batch_size):
                self._waiting.popleft()
            self.step += 1

    @property
    def version(self) -> int:
        """The policy version that the next batch is sampled with."""
        ahead = max(0, self.step - 1 - self._schedule.max_ahead)
        return ahead - ahead % self._schedule.publish_every
