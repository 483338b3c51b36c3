"""Import: rows of files, mapped by a SELECT or a named format, one commit a table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from ..append import Appended
from ..errors import ConfigError, NotFoundError, nearest
from ..ids import lineage_id
from ..query import literal
from ..schema import TABLES
from ..store import Store
from ..undo import also_gave, are_gone, standing
from ..undo import replace as replace_all
from .duckdb_input import InputFile, InputSession
from .import_rows import IMPORTABLE, Gathering, rows_of
from .row_reader import Progress
from .spool import Spool, spooled
from .tokenize import Tokenizer

_NAMED = 20
"""So many files of one import are named where it is written down."""


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
    """Lines and rows left out because they are wrong."""
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
    rejected: dict[str, int] = field(default_factory=dict)
    """Lines and rows left out because they are wrong, by reason."""


def import_rows(
    store: Store,
    name: str,
    file: InputFile | Sequence[InputFile],
    *,
    sql: str | None = None,
    taskset: str | None = None,
    split: str | None = None,
    tokenizer: Tokenizer | None = None,
    replace: str | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Append rows of files to `tasks`, `experiences` or `preferences`: all of them, or none.

    Several files are one import, of one commit a table. For each, one SELECT over the table
    `input`, which may join the store's own tables, gives columns named like ours; without one, the
    file's format does, or its columns are ours. What is left out is filled in: see `filling`. Rows
    that are stored already are left out, so a second import of the same file adds nothing. With a
    `tokenizer`, experiences of text get tokens.

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
    files = [file] if isinstance(file, InputFile) else list(file)
    replaced = [] if replace is None else to_replace(store, replace, name, files)
    gathered = Gathering(store, name, tokenizer, progress)
    with spooled() as spool:
        for one in files:
            gathered.read(one, spool, sql=sql, taskset=taskset, split=split)
        spool.close()
        named = lineage_id()
        done = store.append_streams({n: gathered.told(spool, n, named) for n in spool.tables})
        is_other = replace is not None or any(found.rows for found in done.values())
        is_other = is_other or any(are_gone(store, n, _ids(spool, n)) for n in done)
        for table_name in done if is_other else ():
            if done[table_name].duplicates:
                also_gave(store, named, table_name, _ids(spool, table_name))
    if is_other:
        note(store, name, files, done, named, rows_in=gathered.input_rows)
        replace_all(store, replaced, by=named)
    rejected = [*{id(f.rejected): f.rejected for f in files if f.rejected}.values()]
    for wrong in rejected:
        wrong.write()
    why = sum((wrong.why for wrong in rejected), Counter[str]())
    stored = {n: found.rows for n, found in done.items() if n != name}
    return Imported(
        name,
        done[name].rows,
        done[name].duplicates,
        stored.get("tasks", 0),
        gathered.input_rows,
        why.total(),
        stored.get("experiences", 0),
        ", ".join(sorted(gathered.formats)) or None,
        dict(gathered.left_out),
        dict(gathered.not_read),
        gathered.tokenization.done if gathered.tokenization else 0,
        dict(gathered.tokenization.why_not) if gathered.tokenization else {},
        named if is_other else None,
        tuple(replaced),
        dict(gathered.experiences.untrainable),
        dict(why),
    )


def to_replace(store: Store, wanted: str, name: str, files: Sequence[InputFile]) -> list[str]:
    """Return the imports that count and are to be replaced; none of a file that is new."""
    found = standing(store, wanted, sink=name)
    if found or wanted in {_called(files), *(f.name for f in files)}:
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


def _called(files: Sequence[InputFile]) -> str:
    """Return what the files of an import are called together."""
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    return ", ".join(file.name for file in files[:_NAMED]) + more


def note(
    store: Store,
    name: str,
    files: Sequence[InputFile],
    done: dict[str, Appended],
    lineage_id: str,
    *,
    rows_in: int,
) -> None:
    """Write down which files the rows of these table versions came from."""
    versions = [{"name": n, "version": found.version} for n, found in done.items()]
    row = {
        "lineage_id": lineage_id,
        "pipeline": "import",
        "source": f"file {_called(files)}",
        "sink": name,
        "operators": [],
        "source_versions": [],
        "sink_versions": versions,
        "rows_in": rows_in,
        "rows_out": done[name].rows,
        "rows_dropped": 0,
    }
    store.append("lineage", [row])


def check_select(name: str, file: InputFile, *, sql: str | None = None) -> None:
    """Raise what `import_rows` does for a SELECT that is wrong, before there is a store.

    The store's tables are there, and empty.
    """
    rows_of(name, file, InputSession(file, None, spelled=True), sql, None)
