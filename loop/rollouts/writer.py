"""Finished groups go to the store one by one: what finishes during a commit shares the next."""

import asyncio
from collections.abc import Sequence

from ...pipelines.inline import Chain, apply_before_store, record
from ...store import Experience, Store
from ..trajectories.rows import fitting, store_rows

Stored = list[Experience]
"""A group's own rows as they were stored, those that operators added left out."""


class RolloutWriter:
    """Stores the rows of finished groups, after the operators, in a thread off the event loop."""

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
