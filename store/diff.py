"""Differences between two states of the store: rows added and removed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from .schema import TABLES
from .tables import Tables


@dataclass(frozen=True)
class Difference:
    """Rows added to and removed from one table."""

    table: str
    versions: tuple[int, int]
    added: int
    removed: int


@dataclass(frozen=True)
class Differences:
    """Rows added and removed between two states of the store."""

    tables: list[Difference]
    """Those that differ."""
    experiences: list[dict[str, Any]]
    """For each run_id and source that differ: rows added and removed."""


def diff(before: Tables, after: Tables) -> Differences:
    """Compare the store at two moments, by the identity of rows.

    Compaction only moves rows, and so makes no difference.
    """
    tables, sources = [], []
    then, since = before.versions(), after.versions()
    for table in TABLES:
        if then[table] == since[table]:
            continue
        old, new = _rows(before, table), _rows(after, table)
        removed = ~np.isin(old["_rowid"].to_numpy(), new["_rowid"].to_numpy(), kind="sort")
        added = ~np.isin(new["_rowid"].to_numpy(), old["_rowid"].to_numpy(), kind="sort")
        if added.any() or removed.any():
            versions = (then[table], since[table])
            tables.append(Difference(table, versions, int(added.sum()), int(removed.sum())))
        if table == "experiences":
            sources = _by_source(new.filter(added), old.filter(removed))
    return Differences(tables, sources)


def _rows(store: Tables, table: str) -> pl.DataFrame:
    columns = ["run_id", "source"] if table == "experiences" else []
    found = store.dataset(table).scanner(columns=columns, with_row_id=True).to_table()
    return pl.DataFrame(pl.from_arrow(found))


def _by_source(added: pl.DataFrame, removed: pl.DataFrame) -> list[dict[str, Any]]:
    marked = [added.with_columns(added=1, removed=0), removed.with_columns(added=0, removed=1)]
    groups = pl.concat(marked).group_by("run_id", "source").agg(pl.sum("added", "removed"))
    return groups.sort("run_id", "source").to_dicts()
