"""Import rows of files, mapped by a SELECT or a named format, in one commit per table."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from ..append import Appended
from ..errors import ConfigError, NotFoundError, nearest
from ..ids import lineage_id
from ..lineage.pipeline_runs import pipeline_run
from ..media import LIMITS, ImageLimits
from ..query import literal
from ..schema import TABLES
from ..store import Store
from ..undo import also_gave, are_gone, standing
from ..undo import replace as replace_all
from .duckdb_input import InputFile, InputSession
from .file_kind import open_input
from .import_rows import IMPORTABLE, Gathering, rows_of
from .rejected_rows import Rejected
from .row_reader import Progress
from .spool import Spool, spooled
from .tokenize import Tokenizer

_NAMED = 20
"""How many files of an import are named in its lineage."""


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    table: str
    rows: int
    """Rows stored."""
    already: int
    """Rows that were stored before."""
    tasks: int
    """Tasks stored with the experiences that tried them."""
    input_rows: int
    """Rows of the file, before the SELECT."""
    skipped: int
    """Invalid lines and rows that were skipped."""
    experiences: int = 0
    """Experiences stored with the preferences that compare them."""
    images: int = 0
    """Images stored with the rows that show them."""
    format: str | None = None
    """The named format, given or recognized."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Rows of the file left out, by reason."""
    not_read: dict[str, int] = field(default_factory=dict)
    """Parts of rows that were not read, by reason."""
    tokenized: int = 0
    """Rows of text that were tokenized."""
    untokenized: dict[str, int] = field(default_factory=dict)
    """Rows that could not be tokenized, by reason."""
    lineage_id: str | None = None
    """The id of this import in its rows; None when all rows were stored before."""
    replaced: tuple[str, ...] = ()
    """The imports that it replaced, whose rows no longer count."""
    untrainable: dict[str, int] = field(default_factory=dict)
    """Experiences that were stored but cannot be trained on, by reason."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Invalid lines and rows that were skipped, by reason."""


def import_file(
    store: Store,
    path: str | Path | Sequence[str | Path],
    table: str,
    *,
    format: str | None = None,
    sql: str | None = None,
    taskset: str | None = None,
    split: str | None = None,
    skip_invalid: bool = False,
    replace: str | None = None,
    images: Path | None = None,
    limits: ImageLimits = LIMITS,
) -> Imported:
    """Import the rows of files into `tasks`, `experiences` or `preferences`, all or none.

    A source is a file, a folder that `datasets` saved or loads, or an address: `hf://OWNER/NAME`,
    `postgresql://HOST/DATABASE#TABLE`, `sqlite:///FILE#TABLE`. Several are one import.

    >>> path = tmp / "sums.jsonl"
    >>> _ = path.write_text('{"q": "1+1=", "a": "2"}')
    >>> sql = "SELECT q AS prompt_text, a AS answer FROM input"
    >>> import_file(store, path, "tasks", sql=sql, taskset="sums").rows
    1

    Columns are named like ours, or `format` (see `rlake import --help`; most are detected) or `sql`
    maps them. Rows that are stored already are skipped, so a second import adds nothing. With
    `skip_invalid`, invalid lines are skipped and counted; `replace` names an earlier import, by its
    file or `lineage_id`, whose rows no longer count. Raises InputError for a file that cannot be
    read, and what `import_rows` raises; then no row is stored.
    """
    paths = [path] if isinstance(path, str | Path) else path
    rejected = Rejected() if skip_invalid else None
    with ExitStack() as opened:
        files = [
            opened.enter_context(open_input(one, format=format, rejected=rejected, split=split))
            for one in paths
        ]
        return import_rows(
            store,
            table,
            files,
            sql=sql,
            taskset=taskset,
            split=split,
            replace=replace,
            images=images,
            limits=limits,
        )


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
    images: Path | None = None,
    limits: ImageLimits = LIMITS,
) -> Imported:
    """Append rows of files to `tasks`, `experiences` or `preferences`: all of them, or none.

    Several files are one import, with one commit per table. For each, one SELECT over the table
    `input`, which may join the store's tables, returns columns named like ours; without a SELECT,
    the file's format maps them, or they are ours already. Missing values are filled in: see
    `defaults`. Rows that are stored already are skipped, so a second import of the same file adds
    nothing. With a `tokenizer`, experiences of text are tokenized.

    `replace` names imports into this table, by a file's name or a `lineage_id`, that this one
    replaces: rows that only they added no longer count, as after `undo`.

    Images of rows (columns `images` or `image`, parts of messages) are stored in `media`, and named
    by id. Their paths are read in the folder `images`, by default the file's own.

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
    # before the files are read: a wrong name fails at once
    replaced = [] if replace is None else to_replace(store, replace, name, files)
    gathered = Gathering(store, name, tokenizer, progress, images=images, limits=limits)
    with spooled() as spool:
        for one in files:
            gathered.read(one, spool, sql=sql, taskset=taskset, split=split)
        # All rows are checked and on the disk before the first is stored.
        spool.close()
        named = lineage_id()
        done = store.append_streams({n: gathered.stamped(spool, n, named) for n in spool.tables})
        is_other = replace is not None or any(found.rows for found in done.values())
        owned = [n for n in done if n != "media"]
        is_other = is_other or any(are_gone(store, n, _ids(spool, n)) for n in owned)
        for table_name in owned if is_other else ():
            if done[table_name].duplicates:
                also_gave(store, named, table_name, _ids(spool, table_name))
    if is_other:
        # after the rows: if the import is killed here, `undo` still finds the rows by their id
        note(store, name, files, done, named, rows_in=gathered.input_rows)
        replace_all(store, replaced, by=named)
    rejected = [*{id(f.rejected): f.rejected for f in files if f.rejected}.values()]
    for wrong in rejected:
        # after the rows are stored: an import that fails leaves no file behind
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
        stored.get("media", 0),
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
    """Return the current imports to replace; none for a file that is imported first."""
    found = standing(store, wanted, sink=name)
    if found or wanted in {_called(files), *(f.name for f in files)}:
        return found
    query = f"SELECT DISTINCT substr(source, 6) FROM lineage WHERE sink = {literal(name)}"
    known = [row[0] for row in store.sql(f"{query} AND pipeline = 'import'").fetchall()]
    raise NotFoundError(
        f"no import of {name} is called `{wanted}`, by a file's name or a `lineage_id`"
        f"{nearest(wanted, known)}"
    )


def _ids(spool: Spool, name: str) -> pl.Series:
    """Return the ids of all rows that go to a table."""
    ids = [pl.Series(values=rows.column(TABLES[name].key[0])) for rows in spool.rows(name)]
    return pl.concat(ids) if ids else pl.Series([], dtype=pl.String)


def _called(files: Sequence[InputFile]) -> str:
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
    """Record which files the rows of these table versions came from."""
    row = pipeline_run(
        lineage_id,
        pipeline="import",
        source=f"file {_called(files)}",
        sink=name,
        rows_in=rows_in,
        rows_out=done[name].rows,
        written={n: found.version for n, found in done.items()},
    )
    store.append("lineage", [row])


def check_select(name: str, file: InputFile, *, sql: str | None = None) -> None:
    """Check a SELECT before there is a store; raises as `import_rows` does.

    The store's tables are empty.
    """
    rows_of(name, file, InputSession(file, None, spelled=True), sql, None)
