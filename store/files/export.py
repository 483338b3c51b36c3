"""Export rows of the store to files that other trainers load."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb
import lance
import pyarrow as pa
import pyarrow.dataset as ds
from xxhash import xxh3_128_digest

from .. import side_columns
from ..blobs import BlobDataset, readable
from ..errors import ConfigError, InputError, QueryError
from ..query import QuerySession, query_error
from ..store import Store
from .atomic_writer import Line, kind_of, write_batches, write_lines
from .defaults import look_up
from .duckdb_input import STEP_ROWS, in_batches
from .export_shapes import CONVERSATION, EXPORTS, PAIR_LINES, LeftOut, Row, Shape, plain
from .image_export import ImageExport
from .row_reader import Progress

_DESIRABLE = "reward > 0"
_READ_ROWS, _READ_BYTES, _READ_AHEAD = 256, 4 << 20, 2
_BUFFER_BYTES = 32 << 20


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: Path
    rows: int
    left_out: int
    """Rows with nothing to export."""
    why: Mapping[str, int] = field(default_factory=dict)
    """Number of rows left out, by reason."""
    labels: Mapping[bool, int] = field(default_factory=dict)
    """Number of rows with each label, for kto."""
    without_margin: int = 0
    """Number of pairs without a margin, for reward; if there are any, no line has a margin."""
    repeated: int = 0
    """Number of lines that equal an earlier one; with `distinct` they are not written."""

    @property
    def kto_weights(self) -> tuple[float, float] | None:
        """TRL's `desirable_weight` and `undesirable_weight` that balance both classes.

        The smaller weight is 1. None for other exports than kto, and when one class has no rows.
        """
        good, bad = self.labels.get(True, 0), self.labels.get(False, 0)
        return (max(1.0, bad / good), max(1.0, good / bad)) if good and bad else None


def export(
    store: Store,
    what: str,
    out: str | Path,
    *,
    where: str | None = None,
    sql: str | None = None,
    rows: pa.Table | None = None,
    with_columns: Sequence[str] = (),
    label: str | None = None,
    as_text: bool = False,
    distinct: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write one of EXPORTS to a file or folder; its suffix, one of SUFFIXES, says how.

    >>> pairs = "SELECT prompt_text, answer AS response_text FROM tasks"
    >>> export(store, "sft", tmp / "sft.jsonl", sql=pairs).rows
    1

    The rows are those of the table (with the side columns `with_columns`) for which `where` holds,
    those of a SELECT, or `rows`, such as a pipeline returned. For kto, `label` is an SQL condition
    over all of them, evaluated before `where`: `reward > avg(reward) OVER (PARTITION BY group_id)`.
    With `as_text`, lines hold plain text instead of messages, and rows with more than a question
    and an answer are left out. With `distinct`, of equal lines only the first is written.

    Raises QueryError, ConfigError, InputError when there is nothing to write, JobError when writing
    fails.
    """
    path, shape = Path(out), EXPORTS[what]
    chosen = _Chosen(what, where, sql, rows, with_columns, label)
    chosen.check()
    if as_text and not shape.has_plain:
        known = ", ".join(f"`{name}`" for name, one in EXPORTS.items() if one.has_plain)
        raise ConfigError(f"`{what}` has no form in plain text; {known} have one")
    if distinct and what == "experiences":
        raise ConfigError("every experience has its own id; take DISTINCT in a `--sql` SELECT")
    kind_of(path, what)
    lake = store if store.is_past else store.at(store.versions())  # it may be read twice
    side_columns.check(lake, side_columns.parse_all(with_columns))
    console = _stored_rows(lake)
    if rows is not None:
        console.put("input", rows)
    query = chosen.query()
    _check_given(console, what, shape, query)
    without_margin = _without_margin(console, query) if what == "reward" else 0
    lines = _Lines(
        lake,
        what,
        shape,
        console,
        query,
        as_text,
        distinct,
        progress,
        ImageExport(lake, path),
        without_margin,
    )
    try:
        if shape.lines is None and not shape.is_pairs:
            schema = console.sql(query).limit(0).to_arrow_table().schema
            written = write_batches(path, schema, _batches(console, query), what)
        else:
            lines.images.look(lines.made())
            written = write_lines(path, lines.chunks, what)
    except InputError as error:
        if str(error) != "no rows":
            raise
        why = "".join(f"; {n} left out: {reason}" for reason, n in lines.why.items())
        raise InputError(f"no rows to export as {what}{why}; nothing was written") from None
    why, labels = dict(lines.why), dict(lines.labels)
    left_out = lines.why.total()
    return Exported(path, written, left_out, why, labels, without_margin, lines.repeated)


def _without_margin(console: QuerySession, query: str) -> int:
    """Return how many pairs have no margin: TRL needs one for every pair of a file, or for none."""
    is_there = "margin" in console.sql(query).columns
    missing = "count(*) FILTER (margin IS NULL)" if is_there else "count(*)"
    with _reading():
        [(found,)] = console.sql(f"SELECT {missing} FROM ({query}\n)").fetchall()
    return int(found)


@dataclass(frozen=True)
class _Chosen:
    """Which rows are exported."""

    what: str
    where: str | None
    sql: str | None
    rows: pa.Table | None
    with_columns: Sequence[str]
    label: str | None

    def check(self) -> None:
        """Raise ConfigError for options that exclude each other."""
        if self.sql is not None and (self.where is not None or self.rows is not None):
            raise ConfigError(
                "`--where` and `--sql` exclude each other; put the condition in the SELECT"
            )
        if self.sql is not None and (self.with_columns or self.label):
            raise ConfigError(
                "a SELECT names its own columns; leave `--side-columns` and `--label` out"
            )
        if self.label is not None and self.what != "kto":
            raise ConfigError(f"`--label` is for kto; {self.what} has no labels")
        if self.with_columns and (EXPORTS[self.what].is_pairs or self.rows is not None):
            raise ConfigError(
                "side columns can only be joined to stored experiences; leave `--side-columns` out"
            )

    def query(self) -> str:
        """Return the SELECT that gives them."""
        if self.sql is not None:
            return self.sql
        shape = EXPORTS[self.what]
        given = set(CONVERSATION) if self.rows is None else set(self.rows.column_names)
        reads = [n for n in shape.reads if n in ("*", "label") or n in given]
        conditions = [f"({self.where}\n)"] if self.where else []
        if shape.lines is not None and (self.rows is None or "drop_reason" in given):
            conditions.insert(0, "drop_reason IS NULL")
        chosen = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        # joins and windows return rows in any order
        order = " ORDER BY experience_id" if self.with_columns or self.label else ""
        return f"SELECT {', '.join(reads)} FROM {self._source(shape)}{chosen}{order}"

    def _source(self, shape: Shape) -> str:
        if shape.is_pairs:
            return "preferences_current AS preferences" if self.rows is None else "input"
        table = side_columns.from_sql(side_columns.parse_all(self.with_columns))
        table = table if self.rows is None else "input"
        if self.what != "kto":
            return f"{table} AS experiences"
        # over all rows: a window function must see whole groups
        label = self.label or _DESIRABLE
        return f"(SELECT *, ({label}\n)::BOOLEAN AS label FROM {table} AS experiences)"


def _check_given(console: QuerySession, what: str, shape: Shape, query: str) -> None:
    columns = console.sql(query).columns
    if shape.needs and not any(needed <= set(columns) for needed in shape.needs):
        needs = ", or ".join(" and ".join(f"`{c}`" for c in sorted(n)) for n in shape.needs)
        names = ", ".join(f"`{c}`" for c in columns)
        raise QueryError(f"the SELECT for {what} must give {needs}; got {names}")


def _batches(console: QuerySession, query: str) -> Iterator[pa.RecordBatch]:
    with _reading():
        yield from in_batches(console.sql(query).to_arrow_reader(STEP_ROWS))


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        raise query_error(error) from error


@dataclass
class _Lines:
    """The lines of an export, and counts of the rows that have none."""

    store: Store
    what: str
    shape: Shape
    console: QuerySession
    query: str
    as_text: bool
    distinct: bool
    progress: Progress | None
    images: ImageExport
    without_margin: int = 0
    """Pairs without a margin, because of which no line has one."""
    why: Counter[str] = field(default_factory=Counter)
    labels: Counter[bool] = field(default_factory=Counter)
    repeated: int = 0
    seen: set[bytes] = field(default_factory=set)
    """Digests of the lines made so far: about 100 bytes of memory a line."""

    def chunks(self) -> Iterator[list[Line]]:
        """Yield lines in chunks, with their images; a columnar file reads them twice."""
        return map(self.images.shown, self.made())

    def made(self) -> Iterator[list[Line]]:
        """Yield lines in chunks."""
        # counted anew in another pass
        self.why.clear()
        self.labels.clear()
        self.seen.clear()
        self.repeated = done = nbytes = 0
        for batch in _batches(self.console, self.query):
            made = self._made(batch)
            while some := list(islice(made, STEP_ROWS)):
                yield some
            done += batch.num_rows
            nbytes += batch.nbytes
            if self.progress is not None:
                self.progress("writing", done, nbytes)

    def _made(self, batch: pa.RecordBatch) -> Iterator[Line]:
        rows = batch.to_pylist()
        stored = self._stored(rows) if self.shape.is_pairs else {}
        for row in rows:
            try:
                lines = self._lines(row, stored)
            except LeftOut as left_out:
                self.why[str(left_out)] += 1
                continue
            for line in lines:
                # `repr` is faster than JSON, which the writer makes of the line anyway
                digest = xxh3_128_digest(repr(line).encode("utf-8", "surrogatepass"))
                self.repeated += (is_repeated := digest in self.seen)
                self.seen.add(digest)
                if is_repeated and self.distinct:
                    continue
                if self.what == "kto":
                    self.labels[bool(line["label"])] += 1
                yield line

    def _lines(self, row: Row, stored: Mapping[str, Row]) -> list[Line]:
        if self.shape.is_pairs:
            two = (stored.get(str(row[name])) for name in ("chosen_id", "rejected_id"))
            line = PAIR_LINES[self.what](*two)
            has_margin = self.what == "reward" and not self.without_margin
            lines = [{**line, "margin": row["margin"]} if has_margin else line]
        else:
            assert self.shape.lines is not None, "an export of lines makes them"
            lines = self.shape.lines(row)
        return plain(lines) if self.as_text else lines

    def _stored(self, rows: Sequence[Row]) -> Mapping[str, Row]:
        ids = {str(row[name]) for row in rows for name in ("chosen_id", "rejected_id") if row[name]}
        return look_up(self.store, "experiences", "experience_id", ids, CONVERSATION)


class _Few(ds.Dataset):
    """A table that DuckDB reads few rows at a time: by default Lance reads 131,072 rows ahead."""

    def __init__(self, dataset: lance.LanceDataset) -> None:
        self._dataset = dataset

    @property
    def schema(self) -> pa.Schema:
        return self._dataset.schema

    def scanner(self, columns: Any = None, filter: Any = None, **_: Any) -> ds.Scanner:
        return self._dataset.scanner(
            columns=columns,
            filter=filter,
            batch_size=_READ_ROWS,
            batch_size_bytes=_READ_BYTES,
            batch_readahead=_READ_AHEAD,
            fragment_readahead=1,
            io_buffer_size=_BUFFER_BYTES,
        )


def _few(name: str, dataset: lance.LanceDataset) -> ds.Dataset:
    rows = readable(name, dataset)
    return rows if isinstance(rows, BlobDataset) else _Few(dataset)


def _stored_rows(store: Store) -> QuerySession:
    """Return a session over the store's tables with bounded read-ahead."""
    console = QuerySession()
    console.show(store.versions(), lambda name, version: _few(name, store.open_at(name, version)))
    return console
