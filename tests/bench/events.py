"""A clock of discrete events, processors that jobs share, and servers that serve batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

Done = Callable[[], None]


@dataclass
class Clock:
    """Calls functions in the order of their times; equal times in the order they were set."""

    now: float = 0.0
    _events: list[tuple[float, int, Done]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def after(self, seconds: float, call: Done) -> None:
        """Call a function after some seconds."""
        heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def run(self, until: Callable[[], bool]) -> None:
        """Call what is due, until a condition holds or nothing is left."""
        while self._events and not until():
            self.now, _, call = heappop(self._events)
            call()


@dataclass
class Processor:
    """Works on several jobs at once, each as fast as the others: processor sharing."""

    clock: Clock
    cores: float = 1.0
    """How many jobs advance at full speed; threads of one interpreter have between 1 and 2."""
    _jobs: list[tuple[float, int, Done]] = field(default_factory=list)
    """Those under way, by the work at which each ends."""
    _work: float = 0.0
    """Seconds of work that a job had which was there from the start."""
    _at: float = 0.0
    _number: int = 0

    def work(self, seconds: float, done: Done) -> None:
        """Spend some seconds of a core, then call a function."""
        self._advance()
        self._number += 1
        heappush(self._jobs, (self._work + seconds, self._number, done))
        self._plan()

    @property
    def _rate(self) -> float:
        return min(1.0, self.cores / max(1, len(self._jobs)))

    def _advance(self) -> None:
        self._work += (self.clock.now - self._at) * self._rate
        self._at = self.clock.now

    def _plan(self) -> None:
        """Come back when the next job ends, unless the jobs change before."""
        if self._jobs:
            self._number += 1
            number = self._number
            left = max(0.0, self._jobs[0][0] - self._work) / self._rate
            self.clock.after(left, lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number != self._number:
            return
        self._advance()
        _, _, done = heappop(self._jobs)
        self._plan()
        done()


@dataclass
class Server:
    """Serves all that waits at once; what comes meanwhile waits for the next batch."""

    processor: Processor
    seconds: Callable[[int], float]
    """What a batch of so many takes."""
    busy: float = 0.0
    """Seconds in which it served."""
    _waiting: list[Done] = field(default_factory=list)
    _is_serving: bool = False

    def add(self, done: Done) -> None:
        """Serve one request, then call a function."""
        self._waiting.append(done)
        # after what else happens now: requests of the same moment share a batch
        self.processor.clock.after(0.0, self._begin)

    def __len__(self) -> int:
        return len(self._waiting)

    def _begin(self) -> None:
        if self._is_serving or not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        self._is_serving, began = True, self.processor.clock.now
        self.processor.work(self.seconds(len(batch)), lambda: self._end(batch, began))

    def _end(self, batch: list[Done], began: float) -> None:
        self._is_serving = False
        self.busy += self.processor.clock.now - began
        for done in batch:
            done()
        self._begin()
