"""Sinks: tables, which are appended to, and files, which are written as a whole."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from ..operators import Operator
from ..store import Task
from ..store.errors import ConfigError, SchemaError, nearest
from ..store.schema import TABLES, table
from .source import File, Source, Table

WRITABLE = ("experience_values", "experiences", "preferences", "scores", "task_values", "tasks")
"""Tables that a pipeline may append to; jobs write the others."""

VALUES = {"experience_values": "experience_id", "task_values": "task_id"}
"""Tables with one value a row, and the column with the id that the value belongs to."""
_TASK = tuple(Task.ask("").row())
_SUFFIXES = (".jsonl", ".parquet")
_FILLED = ("created_at", "source")
_VERSION = 12
"""Digits of an operator's fingerprint that are stored as the version of its values."""


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
        if isinstance(source, File) and Path(source.file).absolute() == Path(sink.file).absolute():
            raise ConfigError(
                f"`{sink.file}` is both read and written, and what was dropped would be lost with "
                "it; write to another file"
            )
    if isinstance(source, Table) and source.mode != "append":
        raise ConfigError("a source has no `mode`; it belongs to the sink")
    if isinstance(sink, Table):
        _check_table(sink, source, operators, out)


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
        names = ("experience_id", "scorer", "scorer_version", "reward")
        return _need(sink, out, names, "end with `score`")
    if sink.table in VALUES:
        return _check_values(sink, operators, out)
    end = "end with `pairs`" if sink.table == "preferences" else "select it"
    required = [c.name for c in declared.columns if c.required and c.default is None]
    _need(sink, out, [name for name in required if name not in _FILLED], end)
    # a new task may name the rollout it was made from, which `tasks` has no column for
    links = ("parent_id",) if sink.table == "tasks" else ()
    for name in out.names():
        if name not in (*declared.names, *links):
            raise ConfigError(
                f"`{name}` is not a column of `{sink.table}`; leave it out, or write to a file"
                f"{nearest(name, declared.names)}"
            )


def _need(sink: Table, out: pl.Schema, names: Sequence[str], end: str) -> None:
    for name in names:
        if name not in out:
            raise ConfigError(f"sink `{sink.table}` needs the column `{name}`; {end}")


def _check_facts(sink: Table, source: Source, operators: Sequence[Operator]) -> None:
    """Refuse a pipeline that would change stored rows."""
    if sink.table != "experiences" or not isinstance(source, Table):
        return
    if source.table == "experiences" and not any(op.kind == "augment" for op in operators):
        raise ConfigError(
            "stored rows of `experiences` never change, and no operator here makes new ones; write "
            "to a file, verdicts to `scores`, pairs to `preferences`, or add an `augment`"
        )


def takes_values(sink: Table | File | None) -> bool:
    """Return whether a sink has one value a row, of which the newest counts."""
    return isinstance(sink, Table) and sink.table in VALUES


def made_by(operators: Sequence[Operator]) -> dict[str, str]:
    """Return the columns that operators derive, each with the version of its operator."""
    made = [op for op in operators if op.kind in ("derive", "prioritize", "filter")]
    return {name: op.fingerprint[:_VERSION] for op in made for name in op.writes}


def _check_values(sink: Table, operators: Sequence[Operator], out: pl.Schema) -> None:
    _need(sink, out, (VALUES[sink.table],), "select it")
    names = [name for name in made_by(operators) if name in out]
    if not names:
        raise ConfigError(
            f"sink `{sink.table}` takes the columns that operators derive, and none here does; "
            "add a `derive` or a `prioritize`"
        )
    for name in names:
        kind = out[name]
        if not kind.is_numeric() and kind != pl.Boolean and kind != pl.String:
            raise ConfigError(
                f"sink `{sink.table}` takes numbers and text, and `{name}` is {kind}; cast it"
            )


def values(rows: pl.DataFrame, key: str, name: str, version: str) -> pl.DataFrame:
    """Return a column as rows: the key, `name`, `maker`, and `value` or `text`."""
    is_text = rows.schema[name] == pl.String
    as_number = pl.lit(None, pl.Float64) if is_text else pl.col(name).cast(pl.Float64)
    # Only what was computed: a row of NULL takes an earlier value back, which is decided elsewhere.
    return rows.filter(pl.col(name).is_not_null()).select(
        key,
        name=pl.lit(name),
        maker=pl.lit(version),
        value=as_number,
        text=pl.col(name) if is_text else pl.lit(None, pl.String),
    )


def as_scores(rows: pl.DataFrame) -> pl.DataFrame:
    """Return verdicts as rows of `scores`."""
    given = [c for c in ("detail",) if c in rows.columns]
    names = ("experience_id", "scorer", "scorer_version")
    return rows.select(*names, pl.col("reward").alias("value"), *given)


def as_tasks(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the tasks that the rows describe; changed content makes a new task with a new id."""
    tasks: list[dict[str, Any]] = []
    for row in rows.to_dicts():
        task = Task.from_row(row)
        if row.get("prompt_text") not in (None, task.prompt_text):
            raise SchemaError(
                f"`prompt_text` of task {row['task_id']!r} differs from its `messages`, from "
                "which it is taken; change `messages`"
            )
        tasks.append(task.row())
    return pl.DataFrame(tasks, dict.fromkeys(_TASK, pl.String))


assert set(WRITABLE) <= set(TABLES), "pipelines write declared tables"
