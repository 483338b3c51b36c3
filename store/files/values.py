"""Import values for stored rows from a file, like those that pipelines derive."""

from typing import Any

import duckdb
import polars as pl

from ..errors import ConfigError, InputError, QueryError, SchemaError
from ..ids import lineage_id
from ..query import is_in
from ..store import Store
from ..undo import replace as replace_all
from .duckdb_input import InputFile, InputSession
from .importer import Imported, note, to_replace

TABLES_OF = {"experience_id": "experience_values", "task_id": "task_values"}
"""The table of values, by the column that identifies their rows."""
_LONG = {"name", "value"}


def import_values(
    store: Store,
    file: InputFile,
    *,
    name: str | None = None,
    sql: str | None = None,
    replace: str | None = None,
) -> Imported:
    """Append the values of a file to `experience_values` or `task_values`: all of them, or none.

    The file, or one SELECT over the table `input`, has `experience_id` or `task_id`, the id of
    stored rows, and one column per value, whose name is that of the column, or `name` when there is
    only one; or it is long: the id, `name` and `value`. Numbers and booleans become numbers; NULL
    is skipped. Values that are current already are skipped, so that a second import of the same
    file adds nothing; otherwise the newest value counts.

    Raises QueryError, SchemaError, ConfigError, InputError or StoreError; then nothing is stored.

    >>> from rlake.store.files import open_input
    >>> path = tmp / "levels.csv"
    >>> [task_id] = store.scan("tasks").collect()["task_id"]
    >>> _ = path.write_text(f"task_id,level\\n{task_id},3\\n")
    >>> with open_input(path) as file:
    ...     import_values(store, file, name="difficulty").rows
    1
    """
    session = InputSession(file, store)
    try:
        given = pl.DataFrame(
            pl.from_arrow(session.select(sql or "SELECT * FROM input").to_arrow_table())
        )
    except duckdb.Error as error:
        raise session.failed(error) from error
    key = next((k for k in TABLES_OF if k in given.columns), None)
    if key is None:
        raise QueryError(
            f"`{file.name}` must say whose values it has, by `experience_id` or `task_id`; got "
            f"{', '.join(f'`{c}`' for c in given.columns)}"
        )
    table = TABLES_OF[key]
    values = _values(given, key, name, file)
    _check(store, key, values, file)
    replaced = [] if replace is None else to_replace(store, replace, table, [file])
    fresh = values if replaced else _fresh(store, table, key, values)
    if not fresh.height:
        return Imported(table, 0, values.height, 0, session.num_rows, 0)
    made = lineage_id()
    marks = {"version": pl.lit(f"import.{made}"), "lineage_id": pl.lit(made)}
    done = store.append(table, fresh.with_columns(**marks))
    note(store, table, [file], {table: done}, made, rows_in=session.num_rows)
    # last: a kill before it leaves the values of both imports, of which the newer count
    replace_all(store, replaced, by=made)
    already = values.height - fresh.height
    return Imported(
        table, done.rows, already, 0, session.num_rows, 0, lineage_id=made, replaced=tuple(replaced)
    )


def _values(given: pl.DataFrame, key: str, name: str | None, file: InputFile) -> pl.DataFrame:
    """Return the rows as (id, name, value, text), without NULL."""
    others = [c for c in given.columns if c not in TABLES_OF]
    if set(others) >= _LONG:
        _refuse_name(name, "the file has a column `name`")
        parts = [_part(given, key, pl.col("name").cast(pl.String), "value", file)]
    else:
        if len(others) != 1:
            _refuse_name(name, f"the file has {len(others)} columns of values")
        parts = [_part(given, key, pl.lit(name or other), other, file) for other in others]
    if not parts or not sum(part.height for part in parts):
        raise InputError(f"`{file.name}` has no values for `{key}`; nothing was imported")
    return pl.concat(parts)


def _refuse_name(name: str | None, why: str) -> None:
    if name is not None:
        raise ConfigError(f"`--name` is for a file with one column of values, and {why}")


def _part(
    given: pl.DataFrame, key: str, name: pl.Expr, column: str, file: InputFile
) -> pl.DataFrame:
    kind = given.schema[column]
    is_text = kind == pl.String
    if not (is_text or kind.is_numeric() or kind == pl.Boolean or kind == pl.Null):
        raise SchemaError(
            f"column `{column}` of `{file.name}` is {kind}, expected numbers, truth values or "
            "text; cast it with `--sql`"
        )
    as_number: Any = pl.lit(None) if is_text else pl.col(column)
    as_text: Any = pl.col(column) if is_text else pl.lit(None)
    return given.filter(pl.col(column).is_not_null()).select(
        pl.col(key).cast(pl.String),
        name=name,
        value=as_number.cast(pl.Float64),
        text=as_text.cast(pl.String),
    )


def _check(store: Store, key: str, values: pl.DataFrame, file: InputFile) -> None:
    """Raise SchemaError for unknown ids, missing names, or two values of one name."""
    for column in (key, "name"):
        if missing := values[column].null_count():
            raise SchemaError(f"`{column}` is NULL in {missing} rows of `{file.name}`")
    ids = store.scan("tasks" if key == "task_id" else "experiences").select(key).collect()[key]
    unknown = values.filter(~pl.col(key).is_in(ids.implode()))
    if unknown.height:
        raise SchemaError(
            f"{unknown[key].n_unique()} of {values[key].n_unique()} ids of `{file.name}` are not "
            f"stored, such as `{unknown[key][0]}`; import those rows first, or leave them out "
            "with `--sql`"
        )
    twice = values.filter(values.select(key, "name").is_duplicated())
    if twice.height:
        raise SchemaError(
            f"`{file.name}` has two values `{twice['name'][0]}` of `{twice[key][0]}`; keep one"
        )


def _fresh(store: Store, table: str, key: str, values: pl.DataFrame) -> pl.DataFrame:
    """Return the values that are not current already."""
    named = is_in("name", values["name"].unique())
    known: Any = store.sql(
        f"SELECT {key}, name, value, text FROM {table}_current WHERE {named}"
    ).pl()
    return values.join(
        known, on=values.columns, how="anti", nulls_equal=True, maintain_order="left"
    )
