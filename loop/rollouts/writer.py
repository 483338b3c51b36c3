"""Store the rows of finished groups; a row that does not fit is replaced by one with the reason."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ...pipelines.inline import Chain, apply_before_store, record
from ...store import Experience, Store
from ...store.errors import SchemaError
from ...store.schema import TABLES
from ...store.validate import conform
from ..trajectories.rewards import LONGEST

Stored = list[Experience]
"""A group's own rows as they were stored, those that operators added left out."""


class RolloutWriter:
    """Stores the rows of finished groups, after the operators, in a thread off the event loop.

    Groups that finish during a commit share the next one.
    """

    def __init__(self, store: Store, chain: Chain, *, lineage_id: str) -> None:
        self._store, self._chain, self._lineage_id = store, chain, lineage_id
        self._waiting: list[tuple[Sequence[Experience], asyncio.Future[Stored]]] = []
        self._work: asyncio.Task[None] | None = None

    async def add(self, rows: Sequence[Experience]) -> Stored:
        """Store a group's rows; when this returns, they are durable.

        A row that does not fit is stored as one that says so. Raises what the store raises.
        """
        future: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        # One commit at a time: concurrent commits conflict, and their retries take longer.
        self._waiting.append((rows, future))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._commit())
        return await future

    async def _commit(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            groups = [list(rows) for rows, _ in waiting]
            try:
                stored = await asyncio.to_thread(self._append, groups)
            except BaseException as error:
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                continue
            for (_, future), rows in zip(waiting, stored, strict=True):
                if not future.done():
                    future.set_result(rows)

    def _append(self, groups: list[list[Experience]]) -> list[Stored]:
        """Store several groups in one commit."""
        stored: list[Experience] = []
        sizes = [len(group) for group in groups]
        made = [row for group in groups for row in group]
        if not self._chain:
            stored = store_rows(self._store, made)
        else:
            rows: list[Experience] = []
            added: list[Experience] = []
            for group in groups:  # an operator sees a group as it would alone
                whole, treated = apply_before_store(self._chain, fitting(group))
                record(self._store, treated, lineage_id=self._lineage_id)
                rows += whole[: len(group)]
                added += whole[len(group) :]
            stored = store_rows(self._store, [*rows, *added])
        return _cut(stored, sizes)


def _cut(rows: Sequence[Experience], sizes: Sequence[int]) -> list[Stored]:
    parts, first = [], 0
    for size in sizes:
        parts.append(list(rows[first : first + size]))
        first += size
    return parts


def store_rows(store: Store, rows: Sequence[Experience]) -> list[Experience]:
    """Append rows and return them as stored; a row that does not fit is replaced by the reason."""
    try:
        store.append("experiences", rows)
        return list(rows)
    except (SchemaError, TypeError):  # TypeError: messages or metadata are not JSON
        # Checked row by row only now: one bad row must not lose the rollouts stored with it.
        checked = fitting(rows)
    store.append("experiences", checked)
    return checked


def fitting(rows: Sequence[Experience]) -> list[Experience]:
    """Return rows that fit the table; a row that does not is replaced by the reason."""
    return [_fitting(row) for row in rows]


def standing_in(row: Experience, reason: str, **known: Any) -> Experience:
    """Return a replacement for a row that cannot be stored, with its ids and the reason."""
    return Experience(
        task_id=row.task_id,
        group_id=row.group_id,
        experience_id=row.experience_id,
        rollout_index=row.rollout_index,
        run_id=row.run_id,
        batch=row.batch,
        group_index=row.group_index,
        purpose=row.purpose,
        finish_reason="error",
        drop_reason=reason[:LONGEST],
        num_turns=0,
        **known,
    )


def _fitting(row: Experience) -> Experience:
    try:
        conform(TABLES["experiences"], [row])
        return row
    except (SchemaError, TypeError) as error:
        return standing_in(row, f"the workflow's row does not fit: {error}")
