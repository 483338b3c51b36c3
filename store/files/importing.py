"""Import: rows of a file, mapped by a SELECT or a named format, one commit a table."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pyarrow as pa

from ..errors import ConfigError, InputError, NotFoundError, nearest
from ..ids import lineage_id
from ..query import literal
from ..schema import TABLES, table
from ..store import Appended, Store
from ..undoing import also_gave, are_gone, standing
from ..undoing import replace as replace_all
from ..validate import conform
from .columns import values_of
from .filling import (
    Defaults,
    ExperienceFill,
    experience_columns,
    fill_tasks,
)
from .formats import fitting, recognized
from .pairs import fill_preferences, of_pairs
from .rows import FileRows, Mapped, Progress, Selected
from .session import InputFile, InputSession
from .spool import Spool, spooled
from .tokens import Tokenization, Tokenizer

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
    experiences: int = 0
    """Experiences stored with the preferences that compare them."""
    format: str | None = None
    """The named format, also when the file was recognized as one."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Rows of the file left out, by reason."""
    not_read: dict[str, int] = field(default_factory=dict)
    """Parts of rows that were not read, by reason."""
    tokenized: int = 0
    """Rows of text that got tokens."""
    untokenized: dict[str, int] = field(default_factory=dict)
    """Rows that a tokenizer was named for, and that stay text, by reason."""
    lineage_id: str | None = None
    """What its rows say of who added them; None: it found all there already."""
    replaced: tuple[str, ...] = ()
    """The imports that it was made in place of, whose rows do not count any more."""
    untrainable: dict[str, int] = field(default_factory=dict)
    """Experiences read that no model can be trained on, by reason; they are stored."""


def import_rows(
    store: Store,
    name: str,
    file: InputFile,
    *,
    sql: str | None = None,
    taskset: str | None = None,
    split: str | None = None,
    tokenizer: Tokenizer | None = None,
    replace: str | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Append the rows of a file to `tasks`, `experiences` or `preferences`: all of them, or none.

    One SELECT over the table `input`, which may join the store's own tables, gives columns named
    like ours; without one, the file's format does, or its columns are ours. What is left out is
    filled in: see `filling`. Rows that are stored already are left out, so a second import of the
    same file adds nothing. With a `tokenizer`, experiences of text get tokens.

    It takes the place of the imports into this table that `replace` names, by a file's name or a
    `lineage_id`: what they added, and it does not, counts no more, as if `undo` had taken it back.

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
    if tokenizer is not None and name == "tasks":
        raise ConfigError("`--tokenizer` is for experiences and pairs; tasks have no answer")
    session = InputSession(file, store)
    rows = _rows(name, file, session, sql, progress)
    replaced = [] if replace is None else _replaced(store, replace, name, file)
    if name == "preferences" and not rows.is_pairs and (taskset or (split and file.kind != "hf")):
        raise ConfigError("`--taskset` and `--split` are for tasks; preferences have none")
    defaults = Defaults(taskset or Path(file.name).stem, split or "train")
    tokenization = Tokenization(tokenizer) if tokenizer else None
    with spooled() as spool:
        experiences = ExperienceFill(store, defaults, tokenization=tokenization)
        rows.spool(_fill(name, rows, spool, store, defaults, experiences))
        spool.close()
        if not rows.read:
            raise _nothing(rows, file, session)
        named = lineage_id()
        done = {n: _store(store, n, spool, named, progress) for n in IMPORTABLE if n in spool.names}
        is_other = replace is not None or any(found.rows for found in done.values())
        is_other = is_other or any(are_gone(store, n, _ids(spool, n)) for n in done)
        for table_name in done if is_other else ():
            if done[table_name].already:
                also_gave(store, named, table_name, _ids(spool, table_name))
    if is_other:
        _note(store, name, file, done, named, rows_in=session.num_rows)
        replace_all(store, replaced, by=named)
    stored = {n: found.rows for n, found in done.items() if n != name}
    return Imported(
        name,
        done[name].rows,
        done[name].already,
        stored.get("tasks", 0),
        session.num_rows,
        file.skipped,
        stored.get("experiences", 0),
        rows.format.name if rows.format else None,
        dict(rows.left_out),
        dict(rows.not_read),
        tokenization.done if tokenization else 0,
        dict(tokenization.why_not) if tokenization else {},
        named if is_other else None,
        tuple(replaced),
        untrainable=dict(experiences.untrainable),
    )


def _replaced(store: Store, wanted: str, name: str, file: InputFile) -> list[str]:
    """Return the imports that count and are to be replaced; none of a file that is new."""
    found = standing(store, wanted, sink=name)
    if found or wanted == file.name:
        return found
    query = f"SELECT DISTINCT substr(source, 6) FROM lineage WHERE sink = {literal(name)}"
    known = [row[0] for row in store.sql(f"{query} AND pipeline = 'import'").fetchall()]
    raise NotFoundError(
        f"there is no import of {name} called `{wanted}`, by a file's name or a `lineage_id`"
        f"{nearest(wanted, known)}"
    )


def _ids(spool: Spool, name: str) -> pl.Series:
    """Return the ids of all rows that go to a table."""
    ids = [pl.Series(values=rows.column(TABLES[name].key[0])) for rows in spool.rows(name)]
    return pl.concat(ids) if ids else pl.Series([], dtype=pl.String)


def _fill(
    name: str,
    rows: FileRows,
    spool: Spool,
    store: Store,
    defaults: Defaults,
    experiences: ExperienceFill,
) -> Callable[[pa.Table], None]:
    """Return what fills rows in and spools them, for each table that they go to."""

    def put(table_name: str, filled: pa.Table) -> None:
        rows.check(table_name, filled)
        spool.put(table_name, filled)

    def fill(batch: pa.Table) -> None:
        if name == "tasks":
            put("tasks", fill_tasks(batch, defaults))
        elif name == "preferences" and not rows.is_pairs:
            put("preferences", fill_preferences(batch, store))
        else:
            tasks, filled = experiences.with_tasks(batch)
            put("experiences", filled)
            if tasks:
                spool.put_tasks(conform(TABLES["tasks"], tasks).drop_columns("created_at"))
            if name == "preferences":
                spool.put("preferences", of_pairs(filled, values_of(batch, "margin")))

    return fill


def _store(
    store: Store, name: str, spool: Spool, lineage_id: str, progress: Progress | None
) -> Appended:
    def told() -> Iterator[pa.Table]:
        done = nbytes = 0
        for batch in spool.rows(name):
            done += batch.num_rows
            nbytes += batch.nbytes
            if progress is not None:
                progress(f"storing {name}", done, nbytes)
            yield _stamped(batch, lineage_id)

    return store.append_stream(name, told())


def _stamped(rows: pa.Table, lineage_id: str) -> pa.Table:
    """Let rows say which import added them, whatever the file says."""
    rows = rows.select([n for n in rows.column_names if n != "lineage_id"])
    return rows.append_column("lineage_id", pa.repeat(lineage_id, rows.num_rows))


def _note(
    store: Store,
    name: str,
    file: InputFile,
    done: dict[str, Appended],
    lineage_id: str,
    *,
    rows_in: int,
) -> None:
    """Write down which file the rows of these table versions came from."""
    versions = [{"name": n, "version": found.version} for n, found in done.items()]
    row = {
        "lineage_id": lineage_id,
        "pipeline": "import",
        "source": f"file {file.name}",
        "sink": name,
        "operators": [],
        "source_versions": [],
        "sink_versions": versions,
        "rows_in": rows_in,
        "rows_out": done[name].rows,
        "rows_dropped": 0,
    }
    store.append("lineage", [row])


def _nothing(rows: FileRows, file: InputFile, session: InputSession) -> InputError:
    why = "".join(f"; {n} rows: {reason}" for reason, n in rows.left_out.items())
    what = "the SELECT over" if rows.format is None else f"format `{rows.format.name}` of"
    return InputError(
        f"{what} `{file.name}` gave no rows, of {session.num_rows} in the file{why}; "
        "nothing was imported"
    )


def check_select(name: str, file: InputFile, *, sql: str | None = None) -> None:
    """Raise what `import_rows` does for a SELECT that is wrong, before there is a store.

    The store's tables are there, and empty.
    """
    _rows(name, file, InputSession(file, None), sql, None)


def _rows(
    name: str, file: InputFile, session: InputSession, sql: str | None, progress: Progress | None
) -> FileRows:
    """Choose how the file's rows become ours."""
    found = file.format
    if found is not None and sql is not None:
        raise ConfigError(f"format `{found.name}` has a SELECT of its own; leave it or `--sql` out")
    columns = session.columns
    if found is None and sql is None and not _are_ours(name, columns):
        found = recognized(columns, name)
        if found is None and (known := fitting(columns, name)):
            named = " or ".join(f"`--format {one}`" for one in known)
            raise ConfigError(
                f"`{file.name}` has columns that are not of `{name}`, and those of a known format; "
                f'say so with {named}, or map them with `--sql "SELECT ... FROM input"`'
            )
    if found is None:
        return Selected(table(name), file, session, progress, sql or "SELECT * FROM input")
    if name not in found.tables:
        raise ConfigError(f"format `{found.name}` gives {' and '.join(found.tables)}, not `{name}`")
    if not found.fits(columns):
        needs = ", or ".join(" and ".join(f"`{c}`" for c in sorted(n)) for n in found.needs)
        raise InputError(
            f"`{file.name}` does not fit format `{found.name}`: it needs the columns {needs}, "
            f"got {', '.join(f'`{c}`' for c in columns)}"
        )
    if found.selects:
        return Selected(table(name), file, session, progress, found.selects[name], found)
    return Mapped(table(name), file, session, progress, found)


def _are_ours(name: str, columns: list[str]) -> bool:
    ours = experience_columns(columns) if name == "experiences" else table(name).columns
    return set(columns) <= {c.name for c in ours}
