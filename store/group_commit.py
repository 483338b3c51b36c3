"""Group commit: one thread commits what many threads submit, in few commits."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from time import monotonic
from typing import Self

import pyarrow as pa

from .append import Appended, WritableTables, append_all
from .errors import ConflictError, SchemaError, StarvedError, StoreError
from .schema import table
from .validate import Rows, check

MAX_BYTES = 8 << 20
"""Size of a commit: a table's rows are committed when this much is queued."""
MAX_SECONDS = 0.02
"""How long a row waits for others to share its commit: about as long as a commit takes."""
QUEUE_BYTES = 64 << 20
"""Size of the queue: `submit` blocks while more would be queued."""
WAIT_SECONDS = 60.0
"""How long `submit` waits for room, which is as long as a writer waits for a table's lock."""
_LOG_SECONDS = 1.0

_log = logging.getLogger(__name__)


@dataclass
class _Submission:
    table: str
    rows: pa.Table
    future: "Future[Appended]" = field(default_factory=Future)
    since: float = field(default_factory=monotonic)


class Committer:
    """Commits for all threads of a process; a future is done when its rows are stored.

    Rows of one thread are stored in the order in which it submitted them. Of submissions that
    share a commit, one that is refused fails alone.

    >>> with store.committer() as committer:
    ...     done = committer.submit("tasks", [Task.ask("3+3=", "6")])
    >>> done.result().rows
    1
    """

    def __init__(
        self,
        store: WritableTables,
        *,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
        queue_bytes: int = QUEUE_BYTES,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._store = store
        self._max_bytes, self._max_seconds = max_bytes, max_seconds
        self._queue_bytes, self._wait_seconds = queue_bytes, wait_seconds
        self._queue: list[_Submission] = []
        self._waiting = 0
        """Bytes submitted and not stored yet."""
        self._changed = threading.Condition()
        self._batch: list[_Submission] = []
        self._flushing, self._closed = 0, False
        self._took = 0.0
        # a daemon: a program that forgets to close its committer still ends
        self._thread = threading.Thread(target=self._work, name="rlake-committer", daemon=True)
        self._thread.start()

    def submit(self, name: str, data: Rows) -> "Future[Appended]":
        """Hand over rows, and return at once; the future is done when they are stored.

        Blocks while the queue is full. Raises StarvedError when it stays full, StoreError when the
        committer is closed. Invalid rows fail the future with SchemaError.
        """
        declared = table(name)
        try:
            # in the caller's thread: rows that do not fit never share a commit with others
            rows = check(declared, data)
        except SchemaError as error:
            refused: Future[Appended] = Future()
            refused.set_exception(error)
            return refused
        submission = _Submission(name, rows)
        with self._changed:
            self._wait_for_room(submission)
            if self._closed:
                raise StoreError("the committer is closed; open another with `store.committer()`")
            self._queue.append(submission)
            self._waiting += submission.rows.nbytes
            self._changed.notify_all()
        return submission.future

    def flush(self) -> None:
        """Commit what was submitted so far without waiting for more, and return when it is done.

        The futures report whether their rows were stored.
        """
        with self._changed:
            # A count and not a flag: several threads may flush at the same time.
            self._flushing += 1
            waiting = [s.future for s in (*self._batch, *self._queue)]
            self._changed.notify_all()
        wait(waiting)
        with self._changed:
            self._flushing -= 1

    def close(self) -> None:
        """Flush, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_room(self, new: _Submission) -> None:
        """Wait until the rows fit into the queue; larger ones fit when it is empty."""

        def room() -> bool:
            return self._closed or self._waiting + new.rows.nbytes <= max(
                self._queue_bytes, new.rows.nbytes
            )

        if self._changed.wait_for(room, min(_LOG_SECONDS, self._wait_seconds)):
            return
        _log.warning("%s", self._described(new))
        if not self._changed.wait_for(room, self._wait_seconds - _LOG_SECONDS):
            raise StarvedError(f"gave up after {self._wait_seconds:g} s: {self._described(new)}")

    def _described(self, new: _Submission) -> str:
        return (
            f"{new.rows.nbytes:,} bytes for `{new.table}` wait for room: {self._waiting:,} of "
            f"{self._queue_bytes:,} bytes are queued, the last commit took {self._took:.3f} s"
        )

    def _work(self) -> None:
        while self._next():
            began = monotonic()
            # a future cannot be canceled from here on: its rows are being written
            self._commit([s for s in self._batch if s.future.set_running_or_notify_cancel()])
            self._took = monotonic() - began
            with self._changed:
                # only now: rows take memory until they are written
                self._waiting -= sum(s.rows.nbytes for s in self._batch)
                self._batch = []
                self._changed.notify_all()

    def _next(self) -> bool:
        """Take the next batch: the oldest rows and others for the same table."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return False
            until = self._queue[0].since + self._max_seconds
            full = min(self._max_bytes, self._queue_bytes)
            while not (self._flushing or self._closed or self._waiting >= full):
                left = until - monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            size = 0
            for submission in [s for s in self._queue if s.table == self._queue[0].table]:
                size += submission.rows.nbytes
                # the oldest is always taken, however large: it would wait forever otherwise
                if self._batch and size > self._max_bytes:
                    break
                self._batch.append(submission)
            taken = {id(s) for s in self._batch}
            self._queue = [s for s in self._queue if id(s) not in taken]
            return True

    def _commit(self, batch: Sequence[_Submission]) -> None:
        """Store rows in one commit, or each submission alone when some are refused."""
        if not batch:
            return
        try:
            done = append_all(self._store, batch[0].table, [s.rows for s in batch])
        except (SchemaError, ConflictError) as error:
            if len(batch) == 1:
                return batch[0].future.set_exception(error)
            for submission in batch:
                self._commit([submission])
        except Exception as error:  # noqa: BLE001 - raised by the futures of the rows
            for submission in batch:
                submission.future.set_exception(error)
        else:
            for submission, appended in zip(batch, done, strict=True):
                submission.future.set_result(appended)
