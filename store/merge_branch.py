"""Merge a branch: append what it derived about experiences to its parent."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import lance
import polars as pl
import pyarrow as pa

from . import branches
from .append import WritableTables
from .changes import CREATED
from .errors import QueryError, reading
from .ids import row_digests
from .key_index import content
from .schema import TABLES, Table
from .schema_versions import take
from .tables import Tables, check_present

MERGED = {
    "lineage": (),
    "scores": ("experience_id",),
    "feedback": ("experience_id",),
    "experience_values": ("experience_id",),
    "embeddings": ("experience_id",),
    "preferences": ("chosen_id", "rejected_id"),
    "drops": ("experience_id",),
    "members": (),
    "withdrawals": (),
}
"""Tables that are merged, with their columns that name experiences."""
_OF_RUNS = ("draws", "metrics", "policies", "job_events", "task_selections", "task_estimates")
_ELSE = "only what was found out about experiences is merged"
_WHY = {
    "experiences": "a branch keeps its own experiences",
    "tasks": "a branch keeps its own tasks, and what is known of them",
    "task_values": "a branch keeps its own tasks, and what is known of them",
    "operator_errors": "they tell of the branch's own runs of pipelines",
    "expectations": "they tell of the branch's own rows",
} | dict.fromkeys(_OF_RUNS, "a branch keeps its own runs")
"""Why rows of the other tables are not merged."""
_BATCH_ROWS = 4096
_SHOWN = 5


@dataclass
class Merged:
    """What happened to the rows that a branch added to a table."""

    rows: int = 0
    """Appended now."""
    already: int = 0
    """Stored before, with the same content."""
    left_out: int = 0
    """Rows about experiences that the parent does not have."""
    num_conflicts: int = 0
    """Stored before with other content: the rows of the branch are left out."""
    conflicts: list[str] = field(default_factory=list)
    """The keys of the first of them."""


def merge(store: WritableTables, name: str) -> dict[str, Merged]:
    """Append the rows that a branch added to the tables of MERGED; repeating it adds nothing.

    The branch keeps its rows; its own experiences, draws and runs are not merged. Raises QueryError
    when the branch was not created from this store or branch.
    """
    check_present(store, "merge into")
    branch = branches.find(store, name)
    if branch.parent != store.branch_name:
        parent = f"{store.root}@{branch.parent}" if branch.parent else store.root
        raise QueryError(
            f"branch `{name}` left from `{parent}`, and is merged into that, got `{store.uri}`"
        )
    with reading("table `experiences`"):
        ids = store.dataset("experiences").to_table(columns=["experience_id"])
    known = pl.DataFrame(pl.from_arrow(ids))["experience_id"]
    there = branches.opened(store, name)
    merged = {}
    # `lineage` comes first in MERGED: rows of the other tables refer to it
    for table in MERGED:
        # 1: a table that the branch was created without was empty then
        rows = _added(there.dataset(table), TABLES[table], since=branch.versions.get(table, 1))
        merged[table] = _merge(store, TABLES[table], rows, known)
    return merged


def left_behind(
    store: Tables, name: str, merged: Mapping[str, Merged]
) -> dict[str, dict[str, int]]:
    """Return for each table how many rows of a branch are not merged, by reason."""
    found: dict[str, dict[str, int]] = {}
    for table, rows in branches.rows_added(store, branches.find(store, name)).items():
        message = {_WHY.get(table, _ELSE): max(0, rows)}
        if table in merged:
            message = {
                "of experiences that the store does not have": merged[table].left_out,
                "the store has other content under their ids": merged[table].num_conflicts,
            }
        if any(message.values()):
            found[table] = {why: n for why, n in message.items() if n}
    return found


def _merge(
    store: WritableTables, table: Table, added: Iterator[pa.Table], known: pl.Series
) -> Merged:
    done = Merged()
    new = _new(store, table, added, known, done)
    first = next(new, None)
    if first is not None:
        done.rows = store.append_stream(table.name, chain([first], new)).rows
    return done


def _new(
    store: WritableTables, table: Table, added: Iterator[pa.Table], known: pl.Series, done: Merged
) -> Iterator[pa.Table]:
    """Yield the rows to append, and count the others."""
    stored = _Stored(store, table)
    for rows in added:
        there = _refers_to(rows, known, MERGED[table.name])
        done.left_out += rows.num_rows - there.num_rows
        fresh = stored.without(there, done)
        if fresh.num_rows:
            yield fresh


def _added(dataset: lance.LanceDataset, table: Table, *, since: int) -> Iterator[pa.Table]:
    """Yield the rows added after a version."""
    scanner = dataset.scanner(
        columns=list(table.names), filter=f"{CREATED} > {since}", batch_size=_BATCH_ROWS
    )
    for batch in scanner.to_batches():
        yield pa.Table.from_batches([batch]).select(table.names)


def _refers_to(rows: pa.Table, known: pl.Series, columns: tuple[str, ...]) -> pa.Table:
    """Return the rows whose experiences are known; NULL counts as known."""
    for column in columns:
        ids = pl.Series(values=rows.column(column))
        rows = rows.filter((ids.is_in(known.implode()) | ids.is_null()).to_arrow())
    return rows


class _Stored:
    """The stored rows of a table, looked up by key."""

    def __init__(self, store: WritableTables, table: Table) -> None:
        self._table, self._dataset = table, store.dataset(table.name)
        keys = self._dataset.to_table(columns=list(table.key), with_row_id=True)
        self._keys = pl.DataFrame(pl.from_arrow(keys))

    def without(self, rows: pa.Table, done: Merged) -> pa.Table:
        """Return the rows whose keys are new, and note the others."""
        key = list(self._table.key)
        asked = pl.DataFrame(pl.from_arrow(rows.select(key))).with_row_index("place")
        # Keys of dropped rows hold NULL for the experience or the task, and NULL
        # must equal NULL here.
        both = asked.join(self._keys, on=key, how="inner", nulls_equal=True).sort("place")
        if both.is_empty():
            return rows
        places = both["place"].to_list()
        for place, same in zip(places, self._same(rows.take(places), both), strict=True):
            if same:
                done.already += 1
                continue
            done.num_conflicts += 1
            if len(done.conflicts) < _SHOWN:
                done.conflicts.append(" ".join(str(v) for v in asked.row(place)[1:]))
        return rows.filter((~asked["place"].is_in(both["place"].implode())).to_arrow())

    def _same(self, rows: pa.Table, both: pl.DataFrame) -> Iterator[bool]:
        """Yield whether the stored row has the same content, for each of these rows."""
        stored = take(self._dataset, both["_rowid"].to_list(), self._table.names)
        mine, theirs = (row_digests(content(r, self._table)) for r in (rows, stored))
        pairs = zip(mine, theirs, strict=True)
        return (mine == theirs for mine, theirs in pairs)


assert MERGED.keys() <= TABLES.keys(), "declared tables are merged"
