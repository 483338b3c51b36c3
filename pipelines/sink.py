"""Where a pipeline's rows go: a table is appended to, a file is written whole."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from ..operators import Operator
from ..store import Appended, Store, Task
from ..store.errors import ConfigError, SchemaError, StoreError, nearest
from ..store.schema import TABLES, table
from .source import File, Source, Table, rows_of

WRITABLE = ("derived", "experiences", "preferences", "scores", "tasks")
"""Tables that a pipeline may append to; the others are written by jobs."""

_SUFFIXES = (".jsonl", ".parquet")
_FILLED = ("created_at", "source")
_VERSION = 12
"""Digits of an operator's fingerprint that stand for it as the version of what it derived."""


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
    sink: Table | File,
    rows: pl.DataFrame,
    store: Store,
    pipeline: str,
    read: pl.Series,
    *,
    operators: Sequence[Operator] = (),
    lineage_id: str | None = None,
) -> Appended:
    """Store or write the rows in one step; rows that are there already are left out and counted.

    `read` are the ids that came from the store: those rows are stored, and stay as they are.
    `operators` made the rows, in the pipeline run `lineage_id`.
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
    if sink.table == "derived":
        return _append_derived(rows, store, operators, lineage_id)
    if sink.table == "preferences":
        return _append_pairs(rows, store, pipeline)
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
    if sink.with_columns:
        raise ConfigError("a sink has no `with_columns`; they belong to the source")
    _check_facts(sink, source, operators)
    if sink.table == "scores":
        _need(
            sink, out, ("experience_id", "scorer", "scorer_version", "reward"), "end with `score`"
        )
        return
    if sink.table == "derived":
        _check_derived(sink, operators, out)
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


def _made_by(operators: Sequence[Operator]) -> dict[str, str]:
    """Return the columns that operators derived, and the version of the one that did."""
    made = [op for op in operators if op.kind in ("derive", "prioritize")]
    return {name: op.fingerprint[:_VERSION] for op in made for name in op.writes}


def _check_derived(sink: Table, operators: Sequence[Operator], out: pl.Schema) -> None:
    _need(sink, out, ("experience_id",), "select it")
    names = [name for name in _made_by(operators) if name in out]
    if not names:
        raise ConfigError(
            "sink `derived` takes the columns that operators derive, and none here does; add a "
            "`derive` or a `prioritize`"
        )
    for name in names:
        kind = out[name]
        if not kind.is_numeric() and kind != pl.Boolean and kind != pl.String:
            raise ConfigError(
                f"sink `derived` takes numbers and text, and `{name}` is {kind}; cast it"
            )


def _append_derived(
    rows: pl.DataFrame, store: Store, operators: Sequence[Operator], lineage_id: str | None
) -> Appended:
    """Append one row a value that is not NULL; what the same operator said before is left out.

    A value that came out otherwise this time has the pipeline run behind its version.
    """
    made = [
        _values(rows, name, version)
        for name, version in _made_by(operators).items()
        if name in rows.columns
    ]
    values = pl.concat(made)
    by = ["experience_id", "name", "maker"]
    stored = (
        store.scan("derived")
        .with_columns(maker=pl.col("version").str.split(".").list.first())
        .filter(pl.col("name").is_in(values["name"].unique().implode()))
        .group_by(by)
        .agg(
            was=pl.col("value").sort_by("created_at", "version").last(),
            was_text=pl.col("text").sort_by("created_at", "version").last(),
        )
        .with_columns(stands=True)
        .collect()
    )
    both = values.join(stored, on=by, how="left", maintain_order="left")
    same = pl.col("value").eq_missing(pl.col("was")) & pl.col("text").eq_missing(pl.col("was_text"))
    again = pl.format("{}.{}", "maker", pl.lit(lineage_id))
    new = both.filter(pl.col("stands").is_null() | ~same).select(
        "experience_id",
        "name",
        "value",
        "text",
        version=pl.when("stands").then(again).otherwise("maker"),
        lineage_id=pl.lit(lineage_id),
    )
    done = store.append("derived", new)
    return Appended(done.rows, done.already + values.height - new.height, done.version)


def _values(rows: pl.DataFrame, name: str, version: str) -> pl.DataFrame:
    """Return a column as rows: `experience_id`, `name`, `maker`, and `value` or `text`."""
    is_text = rows.schema[name] == pl.String
    as_number = pl.lit(None, pl.Float64) if is_text else pl.col(name).cast(pl.Float64)
    return rows.filter(pl.col(name).is_not_null()).select(
        "experience_id",
        name=pl.lit(name),
        maker=pl.lit(version),
        value=as_number,
        text=pl.col(name) if is_text else pl.lit(None, pl.String),
    )


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
