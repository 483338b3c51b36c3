"""Compare stored tables with the declared columns.

Columns that an older version lacks are read as NULL; columns of other programs may block appends.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

from .errors import NotAStoreError, SchemaError
from .schema import SCHEMA_VERSION, TABLES, Table, table

if TYPE_CHECKING:
    import polars as pl

VERSION_KEY = "rlake.schema_version"
"""The key of the schema version in a table's metadata."""


_CONVERT = (
    "what a build from before the first release made, export with that build (`rlake export`) and "
    "read in with `rlake import`"
)


def schema_of(dataset: lance.LanceDataset) -> int:
    """Return the schema version of an open table.

    Raises NotAStoreError when rlake did not make it, or a newer or a development build did.
    """
    version = int((dataset.schema.metadata or {}).get(VERSION_KEY.encode(), b"0"))
    place = dataset.uri.rsplit("/", 1)[0]
    if version == 0:
        raise NotAStoreError(f"`{place}` holds tables that rlake did not make")
    if version > SCHEMA_VERSION:
        raise NotAStoreError(
            f"`{place}` has schema {version}, this rlake reads up to {SCHEMA_VERSION}; "
            f"upgrade it with `pip install --upgrade rlake`; {_CONVERT}"
        )
    name = (dataset.schema.metadata or {}).get(b"rlake.table", b"").decode()
    # A renamed column must not be filled with NULL, which would look like lost data.
    if version == SCHEMA_VERSION and name in TABLES and (later := missing(name, dataset.schema)):
        raise NotAStoreError(
            f"table `{name}` of `{place}` has no column `{later[0].name}`; {_CONVERT}"
        )
    return version


def missing(name: str, schema: pa.Schema) -> list[pa.Field]:
    """Return the declared columns that a version of a table lacks."""
    present = set(schema.names)
    return [field for field in table(name).schema if field.name not in present]


def scanned(dataset: lance.LanceDataset, columns: Sequence[str], **options: Any) -> pa.Table:
    """Scan columns of a table; those that an old version of it lacks are NULL in every row."""
    later = _later(dataset, columns)
    there = [c for c in columns if c not in later]
    return _with_nulls(dataset.scanner(columns=there, **options).to_table(), later)


def take(dataset: lance.LanceDataset, row_ids: Sequence[int], columns: Sequence[str]) -> pa.Table:
    """Read columns of the rows at these addresses, in their order; rows that are gone are left out.

    Columns that an old version of the table lacks are NULL in every row.
    """
    if not columns:
        return pa.table({})
    later = _later(dataset, columns)
    there = [c for c in columns if c not in later]
    # the public `take_row_ids` of lancedb neither keeps the order nor reads a pinned version
    rows = dataset._take_rows(list(row_ids), columns=there)  # pyright: ignore[reportPrivateUsage]
    return _with_nulls(rows, later)


def _later(dataset: lance.LanceDataset, columns: Sequence[str]) -> dict[str, pa.Field]:
    """Return those of these columns that the table got after the version of `dataset`."""
    name = (dataset.schema.metadata or {}).get(b"rlake.table", b"").decode()
    lacking = {f.name: f for f in missing(name, dataset.schema)} if name in TABLES else {}
    return {c: lacking[c] for c in columns if c in lacking}


def _with_nulls(rows: pa.Table, fields: Mapping[str, pa.Field]) -> pa.Table:
    for field in fields.values():
        rows = rows.append_column(field, pa.nulls(len(rows), field.type))
    return rows


def complete(frame: "pl.LazyFrame", columns: Sequence[pa.Field]) -> "pl.LazyFrame":
    """Add columns that a version lacks, NULL in every row."""
    import polars as pl

    empty = pl.DataFrame(pl.from_arrow(pa.schema(columns).empty_table()))
    return frame.with_columns(pl.lit(None, kind).alias(n) for n, kind in empty.schema.items())


def foreign(table: Table, dataset: lance.LanceDataset) -> list[pa.Field]:
    """Return the columns of a stored table that are not declared."""
    return [field for field in dataset.schema if field.name not in table.names]


def refuse_foreign(table: Table, dataset: lance.LanceDataset) -> None:
    """Raise SchemaError when a column of another program blocks appends.

    A nullable column is harmless: new rows have NULL in it.
    """
    for field in foreign(table, dataset):
        if not field.nullable:
            what, fix = describe_foreign(table, field)
            raise SchemaError(f"cannot write to `{table.name}`: {what}; {fix}")


def describe_foreign(table: Table, field: pa.Field) -> tuple[str, str]:
    """Return the effect of a column of another program, and how to fix it."""
    remove = f"`lance.dataset('{table.name}.lance').drop_columns(['{field.name}'])`"
    what = f"column `{field.name}` came from outside, and rlake has no value for it"
    if field.nullable:
        return f"{what}: it is NULL in what is appended", f"leave it, or remove it with {remove}"
    alter = f"alter_columns({{'path': '{field.name}', 'nullable': True}})"
    return (
        f"{what}, and it must not be NULL: no row can be appended",
        f"remove it with {remove}, or let it be NULL with `{alter}`",
    )
