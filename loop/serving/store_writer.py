"""Record answered turns: first in the journal, then, session by session, in the store."""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Any

from ...store import Store
from ...store.errors import ConflictError, JobError, QueryError, SchemaError
from ...store.query import is_in
from ...store.records import Experience, Task
from ..chat_api.errors import RequestError, feedback_conflict
from ..chat_api.idempotency import MOST_KNOWN, PREFIX
from ..chat_api.metrics import ServingMetrics
from ..chat_api.sessions import Session
from ..inference.policy import Turn
from ..rollouts.writer import fitting
from .journal import Journal, entries_in, left_behind, session_entry, sessions_of, set_aside
from .rows import SOURCE, experiences, first_row, group_of, num_rollouts

COMMIT_BYTES = 16 << 20
"""Most bytes of sessions that one commit stores."""
MAINTAIN_EVERY = 100
"""Commits between two checks whether the tables need maintenance."""
PERMANENT = (SchemaError, ConflictError, JobError, TypeError, ValueError, KeyError, AttributeError)
"""Errors that a retry would raise again, because the rows themselves cause them."""
_HURRY_SECONDS = 0.2
_LONGEST_PAUSE = 5.0
_GROUPS = 10_000
"""Groups whose number of rollouts is cached."""
_QUERY_NAMES = 1000
"""Most names in one query."""

_log = logging.getLogger(__name__)


class StoreWriter:
    """The sink of a server: a turn is durable when `keep` returns, and a row soon after its end.

    The rows of a session are stored once, when it has ended: facts do not change, and a
    conversation is one row. Until then its turns are in the journal, from which the next server
    stores them if this one is killed. A session that the store refuses is set aside in a file.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        run_id: str,
        metrics: ServingMetrics,
        store_seconds: float = 1.0,
        unstored_bytes: int = 256 << 20,
    ) -> None:
        self._store, self._run_id, self._metrics = store, run_id, metrics
        self._folder = folder
        self._seconds, self._most = store_seconds, unstored_bytes
        self._groups: dict[str, int] = {}
        """The index of the next rollout of each known group."""
        self._waiting: dict[Session, Future[None]] = {}
        self._nbytes = self._commits = 0
        self._changed = threading.Condition()
        self._hurries = self._closed = False
        self.recovered = self._recover()
        """Sessions of killed servers that were stored at the start."""
        self.answered = self._answered()
        """Names of answers to requests with a key, of the last day: these are not sampled again."""
        self._journal = Journal(folder)
        self._thread = threading.Thread(target=self._work, name="rlake-store-writer", daemon=True)
        self._thread.start()

    async def keep(self, session: Session, turns: Sequence[Turn], response_id: str) -> None:
        """Write turns to the journal. Raises RequestError."""
        await self._write("answer", session, lambda: session_entry(session, turns, response_id))

    async def add_feedback(self, session: Session, rows: Sequence[dict[str, Any]]) -> None:
        """Record feedback on a session whose rows are not stored yet. Raises RequestError."""
        known = {row["feedback_id"]: row for row in session.feedback}
        if any(known.get(row["feedback_id"], row) != row for row in rows):
            raise feedback_conflict()
        new = [row for row in rows if row["feedback_id"] not in known]
        # Before the write: the session may end and be stored while the journal syncs.
        session.feedback += new
        try:
            await self._write("feedback", session, lambda: {"key": session.key, "feedback": new})
        except RequestError:
            session.feedback = [row for row in session.feedback if row not in new]
            raise

    async def _write(
        self, noun: str, session: Session, entry: Callable[[], Mapping[str, Any]]
    ) -> None:
        try:
            await self._journal.write(session.key, entry)
        except OSError as error:
            message = f"the {noun} could not be recorded: {error.strerror or error}"
            raise RequestError(message, status=503) from error

    async def ended(self, session: Session) -> None:
        """Queue a session to be stored."""
        with self._changed:
            self._waiting[session] = Future()
            self._nbytes += session.nbytes
            self._changed.notify_all()

    def waiting(self) -> list[Session]:
        """Return the sessions that have ended and are not stored."""
        with self._changed:
            return list(self._waiting)

    async def stored(self, session: Session, *, seconds: float) -> bool:
        """Wait until a session that ended is stored; return False on a timeout."""
        with self._changed:
            future = self._waiting.get(session)
            self._hurries = True
            self._changed.notify_all()
        if future is None:
            return True
        done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds)
        return bool(done)

    def check(self) -> None:
        """Raise RequestError while too many bytes wait to be stored."""
        self._metrics.unstored_bytes.set(self._nbytes)
        if self._nbytes > self._most:
            message = f"{self._nbytes:,} bytes of sessions wait for the store"
            raise RequestError(message, status=503, retry_after=_LONGEST_PAUSE)

    def close(self, *, seconds: float) -> bool:
        """Store what waits, within a time; the next server stores the rest from the journal."""
        with self._changed:
            self._closed = self._hurries = True
            self._changed.notify_all()
        self._thread.join(seconds)
        is_done = not self._thread.is_alive()
        if is_done:
            self._journal.close()
        return is_done

    def _work(self) -> None:
        failed = 0
        while self._wait(failed):
            batch = self._next()
            try:
                self._append(batch)
            except Exception as error:  # noqa: BLE001 - the store may be back soon; the journal keeps it
                failed += 1
                self._metrics.store_failures.inc()
                _log.error("sessions could not be stored (attempt %d): %s", failed, error)
                if self._closed:
                    return
            else:
                failed = 0
                self._done(batch)

    def _wait(self, failed: int) -> bool:
        """Wait for sessions, and for others that share their commit; return whether there are any.

        A failed attempt is followed by a pause whatever else arrives, so that a store that is
        away is not asked in a loop.
        """
        pause = min(_LONGEST_PAUSE, 0.1 * 2**failed) if failed else self._seconds
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            until = monotonic() + pause
            hurried = monotonic() + min(pause, _HURRY_SECONDS)
            while not self._closed and (failed or self._nbytes < COMMIT_BYTES):
                left = (hurried if self._hurries and not failed else until) - monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._hurries = False
            return bool(self._waiting)

    def _next(self) -> list[Session]:
        """Return the next sessions that fit into one commit, at least one."""
        batch: list[Session] = []
        size = 0
        for session in self.waiting():
            size += session.nbytes
            if batch and size > COMMIT_BYTES:
                break
            batch.append(session)
        return batch

    def _done(self, batch: Sequence[Session]) -> None:
        with self._changed:
            futures = [self._waiting.pop(session) for session in batch]
            self._nbytes -= sum(session.nbytes for session in batch)
        for future in futures:
            future.set_result(None)
        self._journal.forget({session.key for session in batch})
        if len(self._groups) > _GROUPS:
            # Only now: until its rows are stored, a group's numbers are known to the cache alone.
            self._groups.clear()
        self._commits += 1
        if self._commits % MAINTAIN_EVERY == 0:  # merges the small files that many commits make
            try:
                self._store.maintain(only_due=True)
            except Exception as error:  # noqa: BLE001 - rows are stored; the next check repeats it
                _log.warning("the store could not be maintained: %s", error)

    def _append(self, sessions: Sequence[Session]) -> None:
        """Store sessions; set aside one that the store refuses, so that it blocks no others."""
        try:
            self._commit(sessions)
        except QueryError:  # raised by the store, not by the rows
            raise
        except PERMANENT as error:
            if len(sessions) > 1:
                for session in sessions:
                    self._append([session])
                return
            path = set_aside(self._folder, sessions[0])
            self._metrics.store_failures.inc()
            _log.error("a session was refused and is kept in `%s`: %s", path, error)

    def _commit(self, sessions: Sequence[Session]) -> None:
        tasks: dict[str, Task] = {}
        rows: list[Experience] = []
        feedback: list[dict[str, Any]] = []
        self._number([s for s in sessions if s.turns and s.rollout is None])
        for session in sessions:
            feedback += session.feedback
            if session.turns:
                made = experiences(session, run_id=self._run_id, rollout=session.rollout or 0)
                tasks |= {task.task_id: task for task in made[0]}
                rows += made[1]
        # tasks first: no stored row may refer to one that is missing
        self._store.append("tasks", list(tasks.values()))
        try:
            done = self._store.append("experiences", rows)
        except (SchemaError, ConflictError, TypeError):
            # a row that does not fit is replaced by the reason: the others are not lost with it
            done = self._store.append("experiences", fitting(rows))
        self._metrics.rows.inc(done.rows)
        if feedback:
            self._store.append("feedback", feedback)

    def _number(self, sessions: Sequence[Session]) -> None:
        """Number the first rollouts of sessions in their groups, with one query for all groups."""
        named = {group_of(s) for s in sessions if s.is_named or s.group_id}
        self._groups |= self._rollouts(named - self._groups.keys())
        for session in sessions:
            group = group_of(session)
            session.rollout = self._groups.get(group, 0)
            if group in named:
                self._groups[group] = session.rollout + num_rollouts(session)

    def _rollouts(self, groups: Collection[str]) -> dict[str, int]:
        """Return how many rollouts of each group are stored, of groups that have any."""
        found: dict[str, int] = {}
        for names in _few_at_once(groups):
            found |= self._store.sql(
                f"SELECT group_id, max(rollout_index) + 1 FROM experiences WHERE "
                f"{is_in('group_id', names)} AND rollout_index IS NOT NULL GROUP BY group_id"
            ).fetchall()
        return found

    def _recover(self) -> int:
        """Store what killed servers had answered; return the number of sessions."""
        count = 0
        for left in left_behind(self._folder):
            stored = self._stored({entry["key"] for entry in entries_in(left)})
            # Feedback is stored again: appending the same row under the same id adds nothing.
            sessions = sessions_of(
                entry
                for entry in entries_in(left)
                if "feedback" in entry or entry["key"] not in stored
            )
            for start in range(0, len(sessions), 256):
                self._append(sessions[start : start + 256])
            count += sum(bool(session.turns) for session in sessions)
        return count

    def _answered(self) -> list[str]:
        found = self._store.sql(
            "SELECT DISTINCT unnest(json_extract_string(metadata, '$.responses[*]')) AS name "
            f"FROM experiences WHERE source = '{SOURCE}' AND contains(metadata, '{PREFIX}') "
            f"AND created_at > now() - INTERVAL 1 DAY LIMIT {MOST_KNOWN}"
        ).fetchall()
        return [row[0] for row in found if row[0].startswith(PREFIX)]

    def _stored(self, keys: Collection[str]) -> set[str]:
        key_of = {first_row(key): key for key in keys}
        found: set[str] = set()
        for names in _few_at_once(key_of):
            rows = self._store.sql(
                f"SELECT experience_id FROM experiences WHERE {is_in('experience_id', names)} "
                f"AND source = '{SOURCE}'"
            ).fetchall()
            found |= {key_of[row[0]] for row in rows}
        return found


def _few_at_once(names: Collection[str]) -> Iterator[list[str]]:
    ordered = sorted(names)
    for start in range(0, len(ordered), _QUERY_NAMES):
        yield ordered[start : start + _QUERY_NAMES]
