"""Send metrics to experiment trackers, which neither delay a job nor make it fail."""

import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from ...store import Store
from ...store.errors import message_of
from ...store.query import literal
from ..config import RunConfig
from .job import Job, run_folder, stored_config
from .tracker import Tracked, Tracker
from .trackers import resolve

MOST_NUMBERS = 100_000
"""Most metrics buffered for a tracker, about 10 MB; beyond them the oldest are dropped."""
MAX_CALLS = 6
"""Calls of a tracker with the same metrics, after 1, 2, 4 ... seconds."""
MOST_REFUSED = 5
"""Consecutive metrics that failed MAX_CALLS times, after which a tracker is given up."""
FIRST_WAIT_SECONDS = 1.0
CLOSE_SECONDS = 60.0
"""Seconds that the end of a job waits for its trackers."""

_log = logging.getLogger(__name__)


def places(store: Store, config: RunConfig) -> list[tuple[str, str]]:
    """Return the name of each tracker of a run, and where it writes."""
    run = Tracked(config.name, "train", "", 1, None, run_folder(store, config), {})
    return [(name, _place(tracker, run)) for name, tracker in _named(config)]


def _place(tracker: Tracker, run: Tracked) -> str:
    place = getattr(tracker, "place", None)
    return str(place(run)) if place else type(tracker).__name__


def _named(config: RunConfig) -> Iterator[tuple[str, Tracker]]:
    """Yield the trackers of a configuration, the second of a kind as `wandb_2`."""
    seen: dict[str, int] = {}
    for spec in config.trackers:
        name, tracker = resolve(spec)
        seen[name] = seen.get(name, 0) + 1
        yield (name if seen[name] == 1 else f"{name}_{seen[name]}"), tracker


@contextmanager
def reporting(job: Job, *, start_step: int | None) -> Iterator["Trackers"]:
    """Show a job in all trackers of its configuration until it ends."""
    named = list(_named(job.config))
    made = Trackers([Line(name, tracker, MOST_NUMBERS) for name, tracker in named])
    if named:
        run = tracked(job, start_step=start_step)
        for line in made.lines:
            line.start(run)
    try:
        yield made
    except BaseException as error:
        made.close(error=str(error) or type(error).__name__)
        raise
    made.close()


def tracked(job: Job, *, start_step: int | None) -> Tracked:
    """Return what trackers receive about a job, which must be recorded already."""
    [(began,)] = job.store.sql(
        f"SELECT min(started_at) FROM job_events WHERE run_id = {literal(job.run_id)} "
        f"AND job = {literal(job.name)}"
    ).fetchall()
    key = hashlib.sha256(f"{job.run_id} {job.name} {began}".encode()).hexdigest()[:8]
    config = json.loads(stored_config(job.config))
    return Tracked(job.run_id, job.name, key, job.attempt, start_step, job.folder, config)


@dataclass(frozen=True)
class Trackers:
    """The trackers of one job."""

    lines: Sequence["Line"]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Enqueue the metrics of a step; returns at once."""
        for line in self.lines:
            line.put(step, values)

    def close(self, *, error: str | None = None) -> None:
        """Wait until everything is written, at most CLOSE_SECONDS."""
        until = monotonic() + CLOSE_SECONDS
        # end all before joining the first: they close in parallel, within one timeout
        for line in self.lines:
            line.end(error)
        for line in self.lines:
            line.join(until - monotonic())

    def counts(self) -> dict[str, float]:
        """Return how often each tracker failed, and how many metrics it lost."""
        return {
            f"trackers/{line.name}/{what}": float(number)
            for line in self.lines
            for what, number in (("failures", line.failures), ("lost", line.lost))
            if number
        }


@dataclass
class Line:
    """One tracker with its queue of metrics and the thread that calls it."""

    name: str
    tracker: Tracker
    most_numbers: int
    failures: int = 0
    """Calls that raised."""
    lost: int = 0
    """Metrics that it did not receive."""
    # `_changed` guards the counters and the queue, which the job and the thread both change.
    _waiting: deque[tuple[int, dict[str, float]]] = field(default_factory=deque)
    _numbers: int = 0
    _refused: int = 0
    _is_started: bool = False
    _error: str | None = None
    _ending: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Number of metrics in the queue."""
        return self._numbers

    def start(self, run: Tracked) -> None:
        """Start the thread; metrics are queued meanwhile."""
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=f"tracker {self.name}", daemon=True
        )
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Enqueue metrics, dropping the oldest ones when the queue is full."""
        with self._changed:
            self._waiting.append((step, dict(values)))
            self._numbers += len(values)
            while self._numbers > self.most_numbers:
                self._drop(self._waiting.popleft()[1])
            self._changed.notify()

    def end(self, error: str | None) -> None:
        """Mark the end of the metrics; from now on no call is repeated."""
        self._error = error  # before the event: the thread reads it once that is set
        self._ending.set()
        with self._changed:
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Wait for the thread; after `seconds` it is left to end with the process."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            with self._changed:
                self.lost += self._numbers
            self.failures += 1
            _log.warning(
                "tracker `%s` did not end within %g s; the table `metrics` has all numbers",
                self.name,
                CLOSE_SECONDS,
            )

    def _work(self, run: Tracked) -> None:
        while (offered := self._next()) is not None:
            is_taken = self._offer(run, *offered)
            self._refused = 0 if is_taken else self._refused + 1
            if not is_taken:
                with self._changed:
                    self.lost += len(offered[1])
            if self._refused >= (1 if self._ending.is_set() else MOST_REFUSED):
                self._give_up()
                return
        if self._is_started:
            fail = getattr(self.tracker, "fail", None)
            if self._error is not None and fail is not None:
                self._try(lambda: fail(self._error))
            self._try(self.tracker.close)

    def _next(self) -> tuple[int, dict[str, float]] | None:
        """Return the oldest metrics of the queue, waiting for some; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending.is_set())
            if not self._waiting:
                return None
            step, values = self._waiting.popleft()
            self._numbers -= len(values)
            return step, values

    def _offer(self, run: Tracked, step: int, values: Mapping[str, float]) -> bool:
        """Pass metrics to the tracker, several times if it raises; start it before the first."""
        for i in range(MAX_CALLS):
            if not self._is_started:
                self._is_started = self._try(lambda: self.tracker.start(run))
            if self._is_started and self._try(lambda: self.tracker.log(step, values)):
                return True
            if self._ending.wait(FIRST_WAIT_SECONDS * 2**i if i + 1 < MAX_CALLS else 0):
                return False
        return False

    def _try(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001  trackers raise what they like
            self.failures += 1
            if self.failures == 1:
                _log.warning(
                    "tracker `%s` failed: %s; the run goes on, and so does the table `metrics`",
                    self.name,
                    message_of(error),
                )
            return False
        return True

    def _drop(self, values: Mapping[str, float]) -> None:
        self._numbers -= len(values)
        self.lost += len(values)

    def _give_up(self) -> None:
        with self._changed:
            self.lost += self._numbers
            self._waiting.clear()
            self._numbers = self.most_numbers = 0  # what comes now is counted as lost
        _log.warning("tracker `%s` is given up after %d failures", self.name, self.failures)
