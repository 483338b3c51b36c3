"""Which schema a table is of, and how a version of before is read: what it lacks is NULL."""

from collections.abc import Sequence
from typing import Any

import lance
import polars as pl
import pyarrow as pa

from .errors import NotAStoreError
from .schema import SCHEMA_VERSION, TABLES, table

VERSION_KEY = "rlake.schema_version"
"""Where a table's own metadata says which schema it is of."""


def schema_of(dataset: lance.LanceDataset) -> int:
    """Return the schema version of an open table.

    Raises NotAStoreError when rlake did not make it, or a newer one did.
    """
    version = int((dataset.schema.metadata or {}).get(VERSION_KEY.encode(), b"0"))
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
