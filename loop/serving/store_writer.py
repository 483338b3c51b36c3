"""Keeps what is answered: first in the journal, then, session by session, in the store."""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from ...store import Store
from ...store.errors import ConflictError, QueryError, SchemaError
from ...store.query import literal
from ...store.records import Experience, Task
from ..chat_api.errors import RequestError, said_already
from ..chat_api.idempotency import MOST_KNOWN, PREFIX
from ..chat_api.metrics import ServingMetrics
from ..chat_api.sessions import Session
from ..inference.policy import Turn
from .dead_letters import NEVER, set_aside
from .journal import Journal, left_behind
from .journal_entries import session_entry, sessions_of
from .rows import SOURCE, experiences, first_row, group_of, tries

COMMIT_BYTES = 16 << 20
"""Of the sessions that are stored in one commit."""
MAINTAIN_EVERY = 100
"""Commits between two looks at whether the tables want care."""
_HURRY_SECONDS = 0.2
_LONGEST_PAUSE = 5.0
_GROUPS = 10_000
"""Groups whose tries are remembered."""
_AT_ONCE = 1000
"""Names that the store is asked for in one query."""

_log = logging.getLogger(__name__)


class StoreWriter:
    """The sink of a server: a turn is durable when `keep` returns, and a row soon after its end.

    A session's rows are stored once, when it has ended: facts do not change, and a conversation is
    one row. Until then its turns stand in the journal, from which the next server stores them if
    this one is killed. A session that the store refuses is set aside in a file.
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
        self._groups: OrderedDict[str, int] = OrderedDict()
        self._waiting: list[tuple[Session, list[Callable[[], None]]]] = []
        self._nbytes, self._commits, self._refused = 0, 0, 0
        self._changed = threading.Condition()
        self._hurries = self._closed = False
        self.recovered = self._recover(folder)
        """Rows of servers that were killed, stored as this one began."""
        self.answered = self._answered()
        """The names of answers to requests with a key, of the last day: these are not made anew."""
        self._journal = Journal(folder)
        self._thread = threading.Thread(target=self._work, name="rlake-keeper", daemon=True)
        self._thread.start()

    async def keep(self, session: Session, turns: Sequence[Turn], response_id: str) -> None:
        """Write turns to the journal."""
        try:
            await self._journal.write(
                session.key, lambda: session_entry(session, turns, response_id)
            )
        except OSError as error:
            raise RequestError(
                f"the answer could not be recorded: {error.strerror or error}", status=503
            ) from error

    async def say(self, session: Session, rows: Sequence[dict[str, Any]]) -> None:
        """Keep feedback on a session whose rows are not stored yet. Raises RequestError."""
        known = {row["feedback_id"]: row for row in session.feedback}
        if any(known.get(row["feedback_id"], row) != row for row in rows):
            raise said_already()
        new = [row for row in rows if row["feedback_id"] not in known]
        session.feedback += new  # before it is kept: the session may end, and be stored, meanwhile
        try:
            await self._journal.write(session.key, lambda: {"key": session.key, "feedback": new})
        except OSError as error:
            session.feedback = [row for row in session.feedback if row not in new]
            raise RequestError(
                f"the feedback could not be recorded: {error.strerror or error}", status=503
            ) from error

    async def ended(self, session: Session) -> None:
        """Let a session be stored."""
        with self._changed:
            self._waiting.append((session, []))
            self._nbytes += session.nbytes
            self._changed.notify_all()

    def waiting(self) -> list[Session]:
        """Return the sessions that have ended and are not stored."""
        with self._changed:
            return [session for session, _ in self._waiting]

    async def stored(self, session: Session, *, seconds: float) -> bool:
        """Wait until a session that ended is stored; False when that takes too long."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(done.set)

        with self._changed:
            found = [then for one, then in self._waiting if one is session]
            for then in found:
                then.append(tell)
            self._hurries = True
            self._changed.notify_all()
        try:
            if found:
                await asyncio.wait_for(done.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def check(self) -> None:
        """Raise RequestError while too much waits to be stored."""
        self._metrics.unstored_bytes.set(self._nbytes)
        if self._nbytes > self._most:
            message = f"{self._nbytes:,} bytes of sessions wait for the store"
            raise RequestError(message, status=503, retry_after=_LONGEST_PAUSE)

    def close(self, *, seconds: float) -> bool:
        """Store what waits, for so long; what is left stays in the journal, for the next server."""
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
                self._append([session for session, _ in batch])
                failed = 0
            except Exception as error:  # noqa: BLE001 - the store may be back soon; the journal holds it
                failed += 1
                self._metrics.store_failures.inc()
                _log.error("sessions could not be stored (try %d): %s", failed, error)
                if self._closed:
                    return
                continue
            self._done(batch)

    def _wait(self, failed: int) -> bool:
        """Wait until there is something to store, and others that share its commit."""
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

    def _next(self) -> list[tuple[Session, list[Callable[[], None]]]]:
        with self._changed:
            batch, size = [], 0
            for one in self._waiting:
                size += one[0].nbytes
                if batch and size > COMMIT_BYTES:
                    break
                batch.append(one)
            return batch

    def _done(self, batch: Sequence[tuple[Session, list[Callable[[], None]]]]) -> None:
        with self._changed:
            self._waiting = self._waiting[len(batch) :]
            self._nbytes -= sum(session.nbytes for session, _ in batch)
            message = [then for _, listeners in batch for then in listeners]
        for then in message:
            then()
        self._journal.forget({session.key for session, _ in batch})
        self._commits += 1
        if self._commits % MAINTAIN_EVERY == 0:
            self._care()

    def _care(self) -> None:
        """Merge the small files that many commits make."""
        try:
            self._store.maintain(only_due=True)
        except Exception as error:  # noqa: BLE001 - rows are stored all the same; next time may do
            _log.warning("the store could not be maintained: %s", error)

    def _append(self, sessions: Sequence[Session]) -> None:
        """Store sessions; one that is refused for good is set aside, and holds up no other."""
        try:
            self._commit(sessions)
        except QueryError:  # of the store, not of the rows
            raise
        except NEVER as error:
            if len(sessions) > 1:
                for session in sessions:
                    self._append([session])
                return
            path = set_aside(self._folder, sessions[0])
            self._metrics.store_failures.inc()
            _log.error("a session is not stored, but kept in `%s`: %s", path, error)

    def _commit(self, sessions: Sequence[Session]) -> None:
        tasks: dict[str, Task] = {}
        rows: list[Experience] = []
        said: list[dict[str, Any]] = []
        self._number([s for s in sessions if s.turns and s.rollout is None])
        for session in sessions:
            said += session.feedback
            if session.turns:
                made = experiences(session, run_id=self._run_id, rollout=session.rollout or 0)
                tasks |= {task.task_id: task for task in made[0]}
                rows += made[1]
        self._store.append("tasks", list(tasks.values()))
        try:
            done = self._store.append("experiences", rows)
        except (SchemaError, ConflictError, TypeError):
            from ..trajectories.rows import fitting

            done = self._store.append("experiences", fitting(rows))
        self._metrics.rows.inc(done.rows)
        if said:
            self._store.append("feedback", said)

    def _number(self, sessions: Sequence[Session]) -> None:
        """Give sessions the numbers of their first tries in their groups, which stay their own.

        The store is asked once for all groups that are not known. None is forgotten before all
        sessions have theirs.
        """
        named = {group_of(s) for s in sessions if s.is_named or s.group_id}
        self._groups |= self._tries(named - self._groups.keys())
        for session in sessions:
            group = group_of(session)
            session.rollout = self._groups.get(group, 0)
            if group in named:
                self._groups[group] = session.rollout + tries(session)
                self._groups.move_to_end(group)
        while len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)

    def _tries(self, groups: Collection[str]) -> dict[str, int]:
        """Return how many tries are stored of groups of which there are some."""
        found: dict[str, int] = {}
        names = sorted(groups)
        for start in range(0, len(names), _AT_ONCE):
            some = ", ".join(map(literal, names[start : start + _AT_ONCE]))
            found |= self._store.sql(
                "SELECT group_id, max(rollout) + 1 FROM experiences "
                f"WHERE group_id IN ({some}) AND rollout IS NOT NULL GROUP BY group_id"
            ).fetchall()
        return found

    def _recover(self, folder: Path) -> int:
        """Store what servers that were killed had answered; return how many sessions that were."""
        count = 0
        for left in left_behind(folder):
            stored = self._stored(sorted(left.keys()))
            sessions = sessions_of(left.entries(stored=stored))
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

    def _stored(self, keys: Sequence[str]) -> Collection[str]:
        """Return the keys of sessions that are stored."""
        found: set[str] = set()
        for start in range(0, len(keys), _AT_ONCE):
            of = {first_row(key): key for key in keys[start : start + _AT_ONCE]}
            rows = self._store.sql(
                "SELECT experience_id FROM experiences WHERE experience_id IN "
                f"({', '.join(map(literal, of))}) AND source = '{SOURCE}'"
            ).fetchall()
            found |= {of[row[0]] for row in rows}
        return found
