"""Differences: what came and what went between two moments of the store."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from .schema import TABLES
from .snapshots import NOW
from .store import Store


@dataclass(frozen=True)
class Difference:
    """What a table has at one moment, and had not at the other."""

    table: str
    versions: tuple[int, int]
    added: int
    removed: int


@dataclass(frozen=True)
class Differences:
    """What came and what went between two moments."""

    tables: list[Difference]
    """Those that differ."""
    experiences: list[dict[str, Any]]
    """For each run_id and source that differ: rows added and removed."""


def diff(store: Store, first: str, second: str = NOW) -> Differences:
    """Compare the store at two snapshots, or at one and now; rows are told by their identity.

    Compaction, which moves rows, is no difference. Raises NotFoundError for a name that is not
    there.
    """
    before, after = (store if name == NOW else store.at(name) for name in (first, second))
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


def _rows(store: Store, table: str) -> pl.DataFrame:
    columns = ["run_id", "source"] if table == "experiences" else []
    found = store.dataset(table).scanner(columns=columns, with_row_id=True).to_table()
    return pl.DataFrame(pl.from_arrow(found))


def _by_source(added: pl.DataFrame, removed: pl.DataFrame) -> list[dict[str, Any]]:
    marked = [added.with_columns(added=1, removed=0), removed.with_columns(added=0, removed=1)]
    groups = pl.concat(marked).group_by("run_id", "source").agg(pl.sum("added", "removed"))
    return groups.sort("run_id", "source").to_dicts()
