"""Writers: rows go to a sink part by part, and what the sink holds already is left out."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path
from typing import Protocol

import polars as pl
import pyarrow.parquet as pq

from ..operators import Operator
from ..store import Appended, Store
from ..store.errors import StoreError, reason
from ..store.validate import Rows
from . import sink as sinks
from .source import File, Table, rows_of


class Writer(Protocol):
    """Takes a pipeline's rows."""

    def put(self, rows: pl.DataFrame) -> None:
        """Write a part of the rows."""
        ...

    def done(self) -> Appended:
        """Return what was written, when all of it was put."""
        ...

    def close(self) -> None:
        """Leave nothing half-done behind."""
        ...


def opened(
    sink: Table | File | None,
    store: Store,
    schema: pl.Schema,
    *,
    pipeline: str,
    read: pl.Series,
    operators: Sequence[Operator] = (),
    lineage_id: str | None = None,
) -> Writer:
    """Return the writer of a sink, for rows with the columns `schema`.

    `read` are the ids that came from the store: those rows are stored, and stay as they are.
    `operators` made the rows, in the pipeline run `lineage_id`.
    """
    if sink is None:
        return Collected(schema)
    if isinstance(sink, File):
        return FileWriter(Path(sink.file), schema)
    if sink.table in sinks.VALUES:
        return Values(store, sink.table, sinks.made_by(operators), lineage_id)
    if sink.table == "preferences":
        return Pairs(store, pipeline)
    forms: Mapping[str, Callable[[pl.DataFrame], Rows]] = {
        "tasks": sinks.as_tasks,
        "scores": sinks.as_scores,
        "experiences": lambda rows: rows.filter(~pl.col("experience_id").is_in(read.implode())),
    }
    return Appending(store, sink.table, forms.get(sink.table, lambda rows: rows))


class Collected:
    """Keeps the rows, for a pipeline without a sink."""

    def __init__(self, schema: pl.Schema) -> None:
        self._parts = [schema.to_frame()]

    def put(self, rows: pl.DataFrame) -> None:
        """Keep a part."""
        self._parts.append(rows)

    def done(self) -> Appended:
        """Return how many rows there are."""
        return Appended(self.rows.height, 0, 0)

    @property
    def rows(self) -> pl.DataFrame:
        """All rows."""
        self._parts = [pl.concat(self._parts)]
        return self._parts[0]

    def close(self) -> None:
        """Nothing is open."""


class FileWriter:
    """Writes beside the file and renames: a reader sees the old one, or the whole new one."""

    def __init__(self, path: Path, schema: pl.Schema) -> None:
        self._path, self._rows = path, 0
        self._beside = path.with_name(f".{path.name}.writing")
        self._empty = schema.to_frame()
        self._parquet: pq.ParquetWriter | None = None
        self._lines: BufferedWriter | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".jsonl":
                self._lines = self._beside.open("wb")
            else:
                self._parquet = pq.ParquetWriter(
                    self._beside, self._empty.to_arrow().schema, compression="zstd"
                )
        except OSError as error:
            raise self._error(error) from error

    def put(self, rows: pl.DataFrame) -> None:
        """Write a part."""
        self._rows += rows.height
        try:
            if self._lines is not None and rows.height:
                rows.write_ndjson(self._lines)
            if self._parquet is not None and rows.height:
                self._parquet.write_table(rows.to_arrow(), row_group_size=max(rows.height, 1))
        except OSError as error:
            raise self._error(error) from error

    def done(self) -> Appended:
        """Put the file in its place."""
        try:
            self._end()
            self._beside.replace(self._path)
        except OSError as error:
            raise self._error(error) from error
        return Appended(self._rows, 0, 0)

    def close(self) -> None:
        """Remove what was written if it was not put in its place."""
        with suppress(OSError):  # what is not whole is removed anyway
            self._end()
        self._beside.unlink(missing_ok=True)

    def _end(self) -> None:
        lines, parquet = self._lines, self._parquet
        self._lines, self._parquet = None, None
        if lines is not None:
            lines.close()
        if parquet is not None:
            parquet.close()

    def _error(self, error: OSError) -> StoreError:
        return StoreError(f"cannot write `{self._path}`: {error.strerror or reason(error)}")


class Appending:
    """Appends to a table, a part in one commit."""

    def __init__(self, store: Store, table: str, form: Callable[[pl.DataFrame], Rows]) -> None:
        self._store, self._table, self._form = store, table, form
        self._rows = self._already = self._version = 0

    def put(self, rows: pl.DataFrame) -> None:
        """Append a part."""
        self.append(self._form(rows))

    def append(self, rows: Rows) -> None:
        """Append rows of the table."""
        done = self._store.append(self._table, rows)
        self._rows += done.rows
        self._already += done.already
        self._version = done.version

    def skip(self, rows: int) -> None:
        """Count rows that are there already."""
        self._already += rows

    def done(self) -> Appended:
        """Return what was appended by all parts together."""
        version = self._version or self._store.versions()[self._table]
        return Appended(self._rows, self._already, version)

    def close(self) -> None:
        """Nothing is open: what was appended is stored."""


class Pairs(Appending):
    """Appends pairs that nobody stored yet: two rows are one pair, whoever says so."""

    def __init__(self, store: Store, pipeline: str) -> None:
        super().__init__(store, "preferences", lambda rows: rows)
        self._source = f"pipeline {pipeline}"
        self._known = set(
            rows_of(store.sql("SELECT preference_id FROM preferences"))["preference_id"]
        )

    def put(self, rows: pl.DataFrame) -> None:
        """Append a part."""
        if "source" not in rows.columns:
            rows = rows.with_columns(pl.lit(self._source).alias("source"))
        is_new = [i not in self._known for i in rows["preference_id"]]
        new = rows.filter(pl.lit(pl.Series(is_new, dtype=pl.Boolean)))
        self._known.update(new["preference_id"])
        self.skip(rows.height - new.height)
        self.append(new)


class Values(Appending):
    """Appends one row a value that is not NULL; what the same operator said before is left out.

    A value that came out otherwise this time has the pipeline run behind its version.
    """

    def __init__(
        self, store: Store, table: str, made_by: Mapping[str, str], lineage_id: str | None
    ) -> None:
        super().__init__(store, table, lambda rows: rows)
        self._by = [sinks.VALUES[table], "name", "maker"]
        self._made_by, self._lineage_id = made_by, lineage_id
        self._known = self._stored()

    def put(self, rows: pl.DataFrame) -> None:
        """Append the values of a part."""
        key = self._by[0]
        made = [
            sinks.values(rows, key, name, version)
            for name, version in self._made_by.items()
            if name in rows.columns
        ]
        values = pl.concat(made)
        new = values.with_columns(version="maker")
        if self._known.height:
            new = self._new(values)
        self.skip(values.height - new.height)
        self.append(
            new.select(key, "name", "value", "text", "version", lineage_id=pl.lit(self._lineage_id))
        )

    def _stored(self) -> pl.DataFrame:
        """Return the newest value of each row, name and maker, by digests of both."""
        latest = [
            pl.col(name).sort_by("created_at", "version").last() for name in ("value", "text")
        ]
        return (
            self._store.scan(self._table)
            .filter(pl.col("name").is_in(list(self._made_by)))
            .with_columns(maker=pl.col("version").str.split(".").list.first())
            .group_by(self._by)
            .agg(latest)
            .select(*_digests(self._by), known=_content())
            .collect()
        )

    def _new(self, values: pl.DataFrame) -> pl.DataFrame:
        by = ["digest", "digest_2"]
        both = values.with_columns(*_digests(self._by), now=_content())
        both = both.join(self._known, on=by, how="left", maintain_order="left")
        again = pl.format("{}.{}", "maker", pl.lit(self._lineage_id))
        stands = pl.col("known").is_not_null()
        return both.filter(~pl.col("now").eq_missing(pl.col("known"))).with_columns(
            version=pl.when(stands).then(again).otherwise("maker")
        )


def _digests(names: Sequence[str]) -> tuple[pl.Expr, pl.Expr]:
    """Return 128 bits that stand for a row's key: of millions, no two are alike by chance."""
    key = pl.struct(names)
    return key.hash(0).alias("digest"), key.hash(1).alias("digest_2")


def _content() -> pl.Expr:
    return pl.struct("value", "text").hash(0)
