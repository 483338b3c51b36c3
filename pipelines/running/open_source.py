"""Open a source: its rows, and where to read their columns one partition at a time."""

from collections.abc import Iterator, Sequence

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa

from ...operators.body import in_utc
from ...store import Store
from ...store import side_columns as sides
from ...store.files.file_kind import InputSession, open_input
from ...store.query import query_error, quoted
from ...store.schema import table
from ..source import File, Source, Sql, Table, are_taken_back, plain, rows_of
from .spill import Spill
from .staged_rows import StagedRows, Stored

_BATCH_ROWS = 2048


def opened(
    source: Source,
    past: Store,
    columns: Sequence[str],
    spill: Spill,
    *,
    addresses: pl.Series | None = None,
) -> StagedRows:
    """Return a source's rows with these columns; of a table, only those at `addresses`.

    Rows of a table are read in place, in the table's order. Rows of a query, a file or a frame are
    spilled first, since partitions with whole groups cannot be cut from a stream.
    """
    if isinstance(source, Table):
        return _table(source, past, columns, addresses)
    if addresses is None or len(addresses):
        for rows in _streamed(source, past, columns):
            spill.put(rows)
    return StagedRows.all_of(spill.done(), columns)


def _table(
    source: Table, past: Store, columns: Sequence[str], addresses: pl.Series | None
) -> StagedRows:
    sides.check(past, source.side)
    key = list(table(source.table).key)
    is_asked = bool(source.where or source.side) or are_taken_back(source, past)
    found = past.dataset(source.table).to_table(columns=key if is_asked else [], with_row_id=True)
    rows = pl.DataFrame(pl.from_arrow(found))
    if addresses is not None:
        rows = rows.filter(pl.col("_rowid").is_in(addresses.cast(pl.UInt64).implode()))
    aliases = [c.alias for c in source.side if c.alias in columns]
    extra = None
    if is_asked:
        message = _asked(source, past, key, aliases)
        rows = rows.join(message, on=key, how="inner", nulls_equal=True, maintain_order="left")
        extra = rows.select(aliases) if aliases else None
    base = Stored.at(past, source.table, rows["_rowid"].to_numpy().astype(np.uint64))
    types = {**base.schema, **({} if extra is None else extra.schema)}
    schema = pl.Schema({name: types[name] for name in columns})
    return StagedRows(base, schema, np.arange(base.height), extra)


def _asked(source: Table, past: Store, key: Sequence[str], aliases: Sequence[str]) -> pl.DataFrame:
    """Return the keys of the rows that `where` selects, with the side columns."""
    names = ", ".join(f'"{n}"' for n in dict.fromkeys((*key, *aliases)))
    # The line break ends a `--` comment in the condition.
    where = f" WHERE ({source.where}\n)" if source.where else ""
    return rows_of(past.sql(f"SELECT {names} FROM {source.rows}{where}"))


def _streamed(
    source: Sql | File | pl.LazyFrame | pl.DataFrame, past: Store, columns: Sequence[str]
) -> Iterator[pl.DataFrame]:
    if isinstance(source, pl.DataFrame):
        yield source.select(columns)
    elif isinstance(source, pl.LazyFrame):
        yield from source.select(columns).collect_batches(maintain_order=True)
    elif isinstance(source, File):
        with open_input(source.file) as file:
            session = InputSession(file, past)
            relation = session.select(source.sql or "SELECT * FROM input")
            try:
                yield from _batches(relation, columns)
            except duckdb.Error as error:
                raise session.failed(error) from error
    else:
        try:
            yield from _batches(past.sql(source.sql), columns)
        except duckdb.Error as error:
            raise query_error(error) from error


def _batches(relation: duckdb.DuckDBPyRelation, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
    wanted = relation.project(", ".join(map(quoted, columns)))
    for batch in wanted.to_arrow_reader(_BATCH_ROWS):
        rows = pa.Table.from_batches([batch])
        yield in_utc(pl.DataFrame(pl.from_arrow(rows.cast(plain(rows.schema)))))
