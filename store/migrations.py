"""Stores of older schemas: tables and columns that came later are added, and read as empty before.

Columns are only ever added, may be NULL, and are added without a file being written, so a store of
any size is brought up to date at once. Versions from before stay as they are: `complete` says what
to put in place of a column that they lack. Writers of an older rlake that are running meanwhile
go on, their rows have NULL in the new columns; when started again, they refuse the newer store.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lance
import polars as pl
import pyarrow as pa

from .errors import NotAStoreError, StoreError, reason
from .locks import locked
from .schema import SCHEMA_VERSION, TABLES, table

if TYPE_CHECKING:
    from .store import Store

_VERSION = "rlake.schema_version"


def schema_of(dataset: lance.LanceDataset) -> int:
    """Return the schema version of an open table.

    Raises NotAStoreError when rlake did not make it, or a newer one did.
    """
    version = int((dataset.schema.metadata or {}).get(_VERSION.encode(), b"0"))
    place = dataset.uri.rsplit("/", 1)[0]
    if version == 0:
        raise NotAStoreError(f"`{place}` holds tables that rlake did not make")
    if version > SCHEMA_VERSION:
        raise NotAStoreError(
            f"`{place}` has schema {version}, this rlake reads up to {SCHEMA_VERSION}; "
            "upgrade it with `pip install --upgrade rlake`; what a build from before the first "
            "release made, export with that build (`rlake export`) and read in with `rlake import`"
        )
    return version


def migrate(store: "Store", name: str) -> None:
    """Bring a table up to date; one that is, or was left half-way, is brought on from there.

    The version is raised last: a table that says it is up to date has all columns.
    """
    if schema_of(store.open_at(name)) == SCHEMA_VERSION:
        return
    with locked(store, name):
        dataset = store.open_at(name)
        try:
            later = missing(name, dataset.schema)
            if later:
                dataset.add_columns(pa.schema(later))
            dataset.update_schema_metadata({_VERSION: str(SCHEMA_VERSION)})
        except (OSError, RuntimeError, ValueError) as error:
            raise StoreError(
                f"cannot bring table `{name}` of `{store.uri}` up to date: {reason(error)}; what "
                "it holds is untouched, open the store again to go on"
            ) from error


def missing(name: str, schema: pa.Schema) -> list[pa.Field]:
    """Return the declared columns that a version of a table lacks."""
    return [field for field in table(name).schema if field.name not in schema.names]


def scanned(dataset: lance.LanceDataset, columns: Sequence[str], **options: Any) -> pa.Table:
    """Scan columns of a table; those that an old version of it lacks are NULL in every row."""
    name = (dataset.schema.metadata or {}).get(b"rlake.table", b"").decode()
    later = {f.name: f for f in missing(name, dataset.schema)} if name in TABLES else {}
    there = [c for c in columns if c not in later]
    rows = dataset.scanner(columns=there, **options).to_table()
    for column in (c for c in columns if c in later):
        rows = rows.append_column(later[column], pa.nulls(len(rows), later[column].type))
    return rows


def complete(frame: pl.LazyFrame, columns: Sequence[pa.Field]) -> pl.LazyFrame:
    """Add columns that a version lacks, NULL in every row."""
    empty = pl.DataFrame(pl.from_arrow(pa.schema(columns).empty_table()))
    return frame.with_columns(pl.lit(None, kind).alias(n) for n, kind in empty.schema.items())
