"""Export: rows of the store as files that other trainers load, written whole or not at all."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import duckdb
import pyarrow as pa

from .. import side_columns
from ..errors import ConfigError, InputError, QueryError
from ..query import QuerySession, query_error
from ..store import Store
from .atomic_writer import Line, kind_of, write_batches, write_lines
from .defaults import look_up
from .duckdb_input import STEP_ROWS, in_batches
from .export_reader import stored_rows
from .export_shapes import EXPORTS, PAIR_LINES, TALK, LeftOut, Row, Shape, plain
from .row_reader import Progress

_DESIRABLE = "reward > 0"


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: Path
    rows: int
    left_out: int
    """Rows that have nothing to write."""
    why: Mapping[str, int] = field(default_factory=dict)
    """Why rows were left out, and how many for each reason."""
    labels: Mapping[bool, int] = field(default_factory=dict)
    """Of kto: how many rows have each label."""
    without_margin: int = 0
    """Of reward: how many pairs have no margin, because of which no line has one."""

    @property
    def kto_weights(self) -> tuple[float, float] | None:
        """TRL's `desirable_weight` and `undesirable_weight` with which both classes weigh the same.

        None where it is no export for kto, or one class has no rows. The smaller weight is 1.
        """
        good, bad = self.labels.get(True, 0), self.labels.get(False, 0)
        return (max(1.0, bad / good), max(1.0, good / bad)) if good and bad else None


def export_sft(
    store: Store, out: str | Path, *, where: str | None = None, sql: str | None = None
) -> Exported:
    """Write conversations as lines of `{"prompt": [messages], "completion": [messages]}`.

    Each assistant turn is the completion of one line, and all that stands before it the prompt:
    TRL's SFTTrainer, whose conversational format this is, trains on completions only. Rows come
    from `experiences` that were not dropped and for which `where` holds, or from a SELECT that
    gives `messages`, or `prompt_text` and `response_text`.

    Raises QueryError, InputError when there is nothing to write, JobError when writing fails.
    """
    return export(store, "sft", out, where=where, sql=sql)


def export_dpo(
    store: Store, out: str | Path, *, where: str | None = None, sql: str | None = None
) -> Exported:
    """Write pairs as lines of `{"prompt": [...], "chosen": [...], "rejected": [...]}`.

    Pairs come from `preferences` for which `where` holds, or from a SELECT that gives `chosen_id`
    and `rejected_id`. The prompt is what both conversations begin with. Left out are pairs that
    part at a question, or in which a user goes on behind an answer: TRL's DPOTrainer, whose
    conversational format this is, trains on all of both answers. Raises as `export_sft` does.
    """
    return export(store, "dpo", out, where=where, sql=sql)


def export_experiences(
    store: Store, out: str | Path, *, where: str | None = None, sql: str | None = None
) -> Exported:
    """Write all columns of `experiences` for which `where` holds, or any SELECT.

    Raises as `export_sft` does.
    """
    return export(store, "experiences", out, where=where, sql=sql)


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
    progress: Progress | None = None,
) -> Exported:
    """Write one of EXPORTS to a file or folder, whose suffix says how: see `writing.SUFFIXES`.

    Rows are those of the table (with side columns, where `with_columns` names some) for which
    `where` holds, or those of a SELECT, or `rows`, such as a pipeline returned, that give what the
    export is made of. `label` is, for kto, an SQL condition over all of them, before `where`:
    `reward > avg(reward) OVER (PARTITION BY group_id)`. With `as_text` lines hold plain text in
    place of messages, and what is more than a question and an answer is left out.

    Raises QueryError, ConfigError, InputError when there is nothing to write, JobError when writing
    fails.
    """
    path, shape = Path(out), EXPORTS[what]
    chosen = _Chosen(what, where, sql, rows, with_columns, label)
    chosen.check()
    if as_text and not shape.has_plain:
        known = ", ".join(f"`{name}`" for name, one in EXPORTS.items() if one.has_plain)
        raise ConfigError(f"`{what}` has no form in plain text; {known} have one")
    kind_of(path, what)
    lake = store if store.is_past else store.at(store.versions())  # it may be read twice
    side_columns.check(lake, side_columns.parse_all(with_columns))
    console = stored_rows(lake)
    if rows is not None:
        console.put("input", rows)
    query = chosen.query()
    _check_given(console, what, shape, query)
    lines = _Lines(lake, what, shape, console, query, as_text=as_text, progress=progress)
    lines.without_margin = _without_margin(console, query) if what == "reward" else 0
    try:
        if shape.lines is None and not shape.is_pairs:
            schema = console.sql(query).limit(0).to_arrow_table().schema
            written = write_batches(path, schema, _batches(console, query), what)
        else:
            written = write_lines(path, lines.chunks, what)
    except InputError as error:
        if str(error) != "no rows":
            raise
        why = "".join(f"; {n} left out: {reason}" for reason, n in lines.why.items())
        raise InputError(f"no rows to export as {what}{why}; nothing was written") from None
    why, labels = dict(lines.why), dict(lines.labels)
    return Exported(path, written, lines.why.total(), why, labels, lines.without_margin)


def _without_margin(console: QuerySession, query: str) -> int:
    """Return how many pairs have no margin: TRL takes one of each pair of a file, or of none."""
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
        """Raise ConfigError for what does not go together."""
        if self.sql is not None and (self.where is not None or self.rows is not None):
            raise ConfigError(
                "`--where` and `--sql` exclude each other; put the condition in the SELECT"
            )
        if self.sql is not None and (self.with_columns or self.label):
            raise ConfigError("a SELECT names its own columns; leave `--with` and `--label` out")
        if self.label is not None and self.what != "kto":
            raise ConfigError(f"`--label` is for kto; {self.what} has no labels")
        if self.with_columns and (EXPORTS[self.what].is_pairs or self.rows is not None):
            raise ConfigError("side columns stand beside stored experiences; leave `--with` out")

    def query(self) -> str:
        """Return the SELECT that gives them."""
        if self.sql is not None:
            return self.sql
        shape = EXPORTS[self.what]
        given = set(TALK) if self.rows is None else set(self.rows.column_names)
        reads = [n for n in shape.reads if n in ("*", "label") or n in given]
        conditions = [f"({self.where}\n)"] if self.where else []
        if shape.lines is not None and (self.rows is None or "drop_reason" in given):
            conditions.insert(0, "drop_reason IS NULL")
        chosen = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        # joins and windows give rows in any order
        order = " ORDER BY experience_id" if self.with_columns or self.label else ""
        return f"SELECT {', '.join(reads)} FROM {self._source(shape)}{chosen}{order}"

    def _source(self, shape: Shape) -> str:
        if shape.is_pairs:
            return "preferences_current AS preferences" if self.rows is None else "input"
        table = side_columns.from_sql(side_columns.parse_all(self.with_columns))
        table = table if self.rows is None else "input"
        if self.what != "kto":
            return f"{table} AS experiences"
        # of all rows, so that a window sees whole groups
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


class _Lines:
    """The lines of an export, and the count of what has none."""

    def __init__(
        self,
        store: Store,
        what: str,
        shape: Shape,
        console: QuerySession,
        query: str,
        *,
        as_text: bool,
        progress: Progress | None,
    ) -> None:
        self._store, self._what, self._shape = store, what, shape
        self._console, self._query, self._as_text = console, query, as_text
        self._progress = progress
        self.why: Counter[str] = Counter()
        self.labels: Counter[bool] = Counter()
        self.without_margin = 0
        """Pairs without a margin, because of which no line has one."""

    def chunks(self) -> Iterator[list[Line]]:
        """Yield lines, some at a time; a table's file reads them twice."""
        self.why.clear()
        self.labels.clear()
        done = nbytes = 0
        for batch in _batches(self._console, self._query):
            made = self._made(batch)
            while some := list(islice(made, STEP_ROWS)):
                yield some
            done += batch.num_rows
            nbytes += batch.nbytes
            if self._progress is not None:
                self._progress("writing", done, nbytes)

    def _made(self, batch: pa.RecordBatch) -> Iterator[Line]:
        rows = batch.to_pylist()
        stored = self._stored(rows) if self._shape.is_pairs else {}
        for row in rows:
            try:
                lines = self._lines(row, stored)
            except LeftOut as left_out:
                self.why[str(left_out)] += 1
                continue
            if self._what == "kto":
                self.labels[bool(lines[0]["label"])] += 1
            yield from lines

    def _lines(self, row: Row, stored: Mapping[str, Row]) -> list[Line]:
        if self._shape.is_pairs:
            two = (stored.get(str(row[name])) for name in ("chosen_id", "rejected_id"))
            line = PAIR_LINES[self._what](*two)
            has_margin = self._what == "reward" and not self.without_margin
            lines = [{**line, "margin": row["margin"]} if has_margin else line]
        else:
            assert self._shape.lines is not None, "what has lines makes them"
            lines = self._shape.lines(row)
        return plain(lines) if self._as_text else lines

    def _stored(self, rows: Sequence[Row]) -> Mapping[str, Row]:
        ids = {str(row[name]) for row in rows for name in ("chosen_id", "rejected_id") if row[name]}
        return look_up(self._store, "experiences", "experience_id", ids, TALK)
