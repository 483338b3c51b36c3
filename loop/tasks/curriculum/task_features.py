"""SQL expressions over tasks: their columns, values in `task_values`, and past pass rates."""

import logging
from collections.abc import Collection

import duckdb
import numpy as np
import polars as pl

from ....store import Store
from ....store.errors import ConfigError, QueryError
from ....store.query import literal, names_in, query_error, quoted
from ....store.schema import TABLES

RATES = ("pass_rate", "num_scored", "num_passed")
"""A task's outcomes over all runs, from the view `task_pass_rates`."""

_log = logging.getLogger(__name__)


def numbers(store: Store, where: str, sql: str, *, key: str) -> np.ndarray:
    """Return an SQL expression's value for each task, by task_id; NaN where it is NULL.

    Raises ConfigError, naming the configuration's `key`, if the expression does not parse, names
    something unknown, is not a finite number, or is NULL for all tasks.
    """
    query = f"SELECT ({sql}\n) AS value {_from(store, where, _names(sql, key))} ORDER BY task_id"
    found = _run(store, query, key)["value"]
    if not found.dtype.is_numeric() and found.dtype != pl.Boolean:
        raise ConfigError(
            f"`{key}` gives {found.dtype}, expected a number; cast it, as in "
            f"`(metadata->>'level')::DOUBLE`: {sql}"
        )
    values = found.cast(pl.Float64)
    if values.null_count() == len(values):
        raise ConfigError(f"`{key}` is NULL for all {len(values)} tasks: {sql}")
    if not values.drop_nulls().is_finite().all():
        raise ConfigError(f"`{key}` must be finite or NULL for each task: {sql}")
    if values.null_count():
        _log.warning("`%s` is NULL for %d of %d tasks", key, values.null_count(), len(values))
    return values.fill_null(float("nan")).to_numpy()


def facts(store: Store, where: str, sql: str, *, own: Collection[str], key: str) -> pl.DataFrame:
    """Return the columns that an expression reads, except those in `own`, by task_id."""
    wanted = _names(sql, key) - set(own)
    columns = sorted(wanted & _known(store))
    query = f"SELECT {', '.join(['task_id', *columns])} {_from(store, where, wanted)}"
    return _run(store, f"{query} ORDER BY task_id", key)


def _names(sql: str, key: str) -> set[str]:
    try:
        return names_in(sql)
    except QueryError as error:
        raise ConfigError(f"`{key}`: {error}") from error


def _known(store: Store) -> set[str]:
    return {*TABLES["tasks"].names, *RATES, *_values(store)} - {"task_id"}


def _values(store: Store) -> set[str]:
    return {n for (n,) in store.sql("SELECT DISTINCT name FROM task_values").fetchall()}


def _from(store: Store, where: str, names: set[str]) -> str:
    """Return the SELECT list: the tasks' columns and the side values that an expression names."""
    added = sorted(names & _values(store) - set(TABLES["tasks"].names))
    joins = [
        f"LEFT JOIN (SELECT task_id, value AS {quoted(name)} FROM task_values_current "
        f"WHERE name = {literal(name)}) USING (task_id)"
        for name in added
    ]
    if names & set(RATES) - set(added):
        joins.append(
            "LEFT JOIN (SELECT task_id, sum(num_scored) AS num_scored, sum(num_passed) AS "
            "num_passed, sum(num_passed) / nullif(sum(num_scored), 0) AS pass_rate "
            "FROM task_pass_rates GROUP BY task_id) USING (task_id)"
        )
    return f"FROM (SELECT * FROM tasks_current AS tasks WHERE ({where}\n)) {' '.join(joins)}"


def _run(store: Store, query: str, key: str) -> pl.DataFrame:
    try:
        return pl.DataFrame(pl.from_arrow(store.sql(query).to_arrow_table()))
    except QueryError as error:
        values = sorted(_values(store))
        message = f"; values of tasks are {', '.join(f'`{v}`' for v in values)}" if values else ""
        raise ConfigError(f"`{key}`: {error}{message}") from error
    except duckdb.Error as error:
        raise ConfigError(f"`{key}`: {query_error(error, 'the expression')}") from error
