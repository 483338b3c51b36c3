"""Import: rows of a file, mapped by one SELECT, appended in one commit."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from ..errors import ConfigError, InputError, SchemaError
from ..schema import TABLES, Column, Table, table
from ..store import Appended, Store
from ..validate import conform
from .columns import RowError, check_columns, typed
from .filling import (
    Defaults,
    ExperienceFill,
    Fill,
    experience_columns,
    fill_preferences,
    fill_tasks,
)
from .reading import BATCH_ROWS, FORMATS, InputFile, InputSession

IMPORTABLE = ("tasks", "experiences", "preferences")
"""Tables that files are imported into; the others are written by jobs."""


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    table: str
    rows: int
    """Rows stored."""
    already: int
    """Rows that the store had already."""
    tasks: int
    """Tasks stored with the experiences that tried them."""
    input_rows: int
    """Rows of the file, before the SELECT."""
    skipped: int
    """Lines left out because they do not parse."""


def import_rows(
    store: Store,
    name: str,
    file: InputFile,
    *,
    sql: str | None = None,
    taskset: str | None = None,
    split: str = "train",
) -> Imported:
    """Append the rows of a file to `tasks`, `experiences` or `preferences`: all of them, or none.

    One SELECT over the table `input`, which may join the store's own tables, gives columns named
    like ours; without one, the file's columns are. What it leaves out is filled in: see `filling`.
    Rows that are stored already are left out, so a second import of the same file adds nothing.

    Raises QueryError, SchemaError, ConflictError, InputError or StoreError; then no row is stored.

    >>> from rlake.store.files import open_input
    >>> path = tmp / "sums.jsonl"
    >>> _ = path.write_text('{"q": "1+1=", "a": "2"}')
    >>> with open_input(path) as file:
    ...     done = import_rows(store, "tasks", file, sql="SELECT q AS prompt_text FROM input")
    >>> done.rows
    1
    """
    if name not in IMPORTABLE:
        raise ConfigError(f"files are imported into {', '.join(IMPORTABLE)}, got `{name}`")
    session = InputSession(file, store)
    rows = _Rows(table(name), file, session, _mapping(name, file, sql))
    defaults = Defaults(taskset or Path(file.name).stem, split)
    tasks = _append_tasks(store, rows, defaults)
    fills: dict[str, Fill] = {
        "tasks": lambda batch: fill_tasks(batch, defaults),
        "experiences": ExperienceFill(store, defaults),
        "preferences": lambda batch: fill_preferences(batch, store),
    }
    done = _append(store, rows, fills[name])
    if not rows.read:
        raise InputError(
            f"the SELECT over `{file.name}` gave no rows, of {session.num_rows} in the file; "
            "nothing was imported"
        )
    return Imported(name, done.rows, done.already, tasks, session.num_rows, file.skipped)


def check_select(name: str, file: InputFile, *, sql: str | None = None) -> None:
    """Raise what `import_rows` does for a SELECT that is wrong, before there is a store.

    The store's tables are there, and empty.
    """
    query = _mapping(name, file, sql)
    _Rows(table(name), file, InputSession(file, None), query)


def _mapping(name: str, file: InputFile, sql: str | None) -> str:
    if file.mapping is None:
        return sql or "SELECT * FROM input"
    if sql is not None:
        raise ConfigError(
            f"format `{file.mapping}` has a SELECT of its own; leave it or `--sql` out"
        )
    selects = FORMATS[file.mapping]
    if name not in selects:
        raise ConfigError(f"format `{file.mapping}` gives {' and '.join(selects)}, not `{name}`")
    return selects[name]


class _Rows:
    """The rows that the SELECT gives, batch by batch, with the place of each for errors."""

    def __init__(self, declared: Table, file: InputFile, session: InputSession, query: str) -> None:
        self.declared, self._file, self._session = declared, file, session
        self._relation = session.select(query)
        given = self._relation.columns
        self._allowed: tuple[Column, ...] = declared.columns
        if declared.name == "experiences":
            self._allowed = experience_columns(given)
        self.makes_tasks = declared.name == "experiences" and "task_id" not in given
        self._query = query
        self.read = 0
        self._first, self._last = 0, pa.table({})
        check_columns(declared, self._allowed, self._relation.limit(0).to_arrow_table().schema)

    def batches(self, fill: Fill) -> Iterator[pa.Table]:
        """Yield filled rows; the SELECT runs anew with each call."""
        self.read = 0
        try:
            reader = self._session.select(self._query).to_arrow_reader(BATCH_ROWS)
            for batch in reader:
                self._first = self.read
                self.read += batch.num_rows
                self._last = fill(typed(batch, self._allowed))
                yield self._last
        except RowError as error:
            raise SchemaError(self._place(error.row) + error.message) from error
        except duckdb.Error as error:
            raise self._session.refused(error) from error

    def located(self, error: SchemaError) -> SchemaError:
        """Say which row of the SELECT it is that `conform` refused."""
        for row in range(self._last.num_rows):
            try:
                conform(self.declared, self._last.slice(row, 1))
            except SchemaError as first:
                message = str(first).replace(" in row 0", "").replace(" in 1 of 1 rows", "")
                return SchemaError(self._place(row) + message)
        return error

    def _place(self, row: int) -> str:
        return f"row {self._first + row + 1} of `{self._file.name}`, as selected: "


def _append(store: Store, rows: _Rows, fill: Fill) -> Appended:
    try:
        return store.append_stream(rows.declared.name, rows.batches(fill))
    except SchemaError as error:
        raise error if str(error).startswith("row ") else rows.located(error) from error


def _append_tasks(store: Store, rows: _Rows, defaults: Defaults) -> int:
    """Store the tasks of experiences that name none, after all the experiences proved valid."""
    if not rows.makes_tasks:
        return 0
    fill = ExperienceFill(store, defaults)

    def tasks() -> Iterator[pa.Table]:
        made: list[pa.Table] = []

        def both(batch: pa.Table) -> pa.Table:
            found, filled = fill.with_tasks(batch)
            made.append(conform(TABLES["tasks"], found))
            return filled

        for filled in rows.batches(both):
            try:
                conform(rows.declared, filled)
            except SchemaError as error:
                raise rows.located(error) from error
            yield made.pop()

    return store.append_stream("tasks", tasks()).rows
