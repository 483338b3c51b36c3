"""Where a pipeline's rows go: a table is appended to, a file is written whole."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from ..operators import Operator
from ..store import Appended, Store, Task
from ..store.errors import ConfigError, SchemaError, StoreError, nearest
from ..store.records import now
from ..store.schema import TABLES, table
from .source import File, Source, Table, rows_of

WRITABLE = ("experiences", "preferences", "scores", "tasks")
"""Tables that a pipeline may append to; the others are written by jobs."""

_SUFFIXES = (".jsonl", ".parquet")
_FILLED = ("created_at", "source")


def check(
    sink: Table | File | None, source: Source, operators: Sequence[Operator], out: pl.Schema
) -> None:
    """Raise ConfigError when a sink cannot take what the operators make, before any work."""
    if isinstance(sink, File):
        if sink.sql is not None:
            raise ConfigError("a file sink takes the rows as they are; `sql` belongs to a source")
        if Path(sink.file).suffix not in _SUFFIXES:
            raise ConfigError(
                f"a file sink is written as {' or '.join(_SUFFIXES)}, got `{sink.file}`"
            )
    if isinstance(sink, Table):
        _check_table(sink, source, operators, out)


def write(
    sink: Table | File, rows: pl.DataFrame, store: Store, pipeline: str, read: pl.Series
) -> Appended:
    """Store or write the rows in one step; rows that are there already are left out and counted.

    `read` are the ids that came from the store: those rows are stored, and stay as they are.
    """
    if isinstance(sink, File):
        _write_file(Path(sink.file), rows)
        return Appended(rows.height, 0, 0)
    if sink.table == "tasks":
        return store.append("tasks", _as_tasks(rows))
    if sink.table == "scores":
        rows = _as_scores(rows)
    if sink.table == "experiences":
        rows = rows.filter(~pl.col("experience_id").is_in(read.implode()))
    if sink.table == "preferences":
        return _append_pairs(rows, store, pipeline)
    if "created_at" in rows.columns:
        rows = rows.with_columns(pl.col("created_at").fill_null(pl.lit(now())))
    return store.append(sink.table, rows)


def _check_table(
    sink: Table, source: Source, operators: Sequence[Operator], out: pl.Schema
) -> None:
    declared = table(sink.table)
    if sink.table not in WRITABLE:
        raise ConfigError(
            f"table `{sink.table}` is not written by pipelines{nearest(sink.table, WRITABLE)}"
        )
    if sink.where is not None:
        raise ConfigError("a sink has no `where`; put a `keep` last among the operators")
    _check_facts(sink, source, operators)
    if sink.table == "scores":
        _need(
            sink, out, ("experience_id", "scorer", "scorer_version", "reward"), "end with `score`"
        )
        return
    end = "end with `pairs`" if sink.table == "preferences" else "select it"
    _need(
        sink, out, [c.name for c in declared.columns if c.required and c.name not in _FILLED], end
    )
    for name in out.names():
        if name not in declared.names:
            raise ConfigError(
                f"`{name}` is not a column of `{sink.table}`; leave it out, or write to a file"
                f"{nearest(name, declared.names)}"
            )


def _need(sink: Table, out: pl.Schema, names: Sequence[str], end: str) -> None:
    for name in names:
        if name not in out:
            raise ConfigError(f"sink `{sink.table}` needs the column `{name}`; {end}")


def _check_facts(sink: Table, source: Source, operators: Sequence[Operator]) -> None:
    """Refuse what would be a change of stored rows."""
    if sink.table != "experiences" or not isinstance(source, Table):
        return
    if source.table == "experiences" and not any(op.kind == "augment" for op in operators):
        raise ConfigError(
            "stored rows of `experiences` never change, and no operator here makes new ones; write "
            "to a file, verdicts to `scores`, pairs to `preferences`, or add an `augment`"
        )


def _append_pairs(rows: pl.DataFrame, store: Store, pipeline: str) -> Appended:
    """Append the pairs that nobody stored yet: the same two rows are one pair, whoever says so."""
    if "source" not in rows.columns:
        rows = rows.with_columns(pl.lit(f"pipeline {pipeline}").alias("source"))
    stored = rows_of(store.sql("SELECT preference_id FROM preferences"))
    new = rows.join(stored, on="preference_id", how="anti", maintain_order="left")
    done = store.append("preferences", new)
    return Appended(done.rows, done.already + rows.height - new.height, done.version)


def _as_scores(rows: pl.DataFrame) -> pl.DataFrame:
    given = [c for c in ("detail",) if c in rows.columns]
    names = ("experience_id", "scorer", "scorer_version")
    return rows.select(*names, pl.col("reward").alias("value"), *given)


def _as_tasks(rows: pl.DataFrame) -> list[Task]:
    """Return the tasks that the rows describe: other content is another task, with its own id."""
    tasks = []
    for row in rows.to_dicts():
        task = Task.from_row(row)
        if row.get("prompt_text") not in (None, task.prompt_text):
            raise SchemaError(
                f"`prompt_text` of task {row['task_id']!r} differs from its `messages`, from "
                "which it is taken; change `messages`"
            )
        tasks.append(task)
    return tasks


def _write_file(path: Path, rows: pl.DataFrame) -> None:
    """Write beside and rename, so that a reader sees the old file or the whole new one."""
    beside = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            rows.write_ndjson(beside)
        else:
            rows.write_parquet(beside)
        beside.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write `{path}`: {error.strerror}") from error


assert set(WRITABLE) <= set(TABLES), "pipelines write declared tables"
