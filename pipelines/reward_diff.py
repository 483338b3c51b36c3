"""Compare two rewards of the same rows: what changes, by group and task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from ..operators.body import evaluate
from ..store import Store
from ..store.errors import QueryError, nearest
from ..store.query import columns_of
from ..store.side_columns import SideColumn, check, from_sql, parse

_CLOSE = 1e-9
"""Rewards and advantages that differ by less are equal: they differ in how they were rounded."""

_ROWS = f"""
    SELECT count(*) AS rows, count(a) AS a_rows, count(b) AS b_rows, count(a + b) AS both,
        count(*) FILTER (abs(b - a) > {_CLOSE} OR (a IS NULL) <> (b IS NULL)) AS changed,
        count(*) FILTER (b - a > {_CLOSE}) AS higher, count(*) FILTER (a - b > {_CLOSE}) AS lower,
        avg(a) FILTER (b IS NOT NULL) AS a_mean, avg(b) FILTER (a IS NOT NULL) AS b_mean,
        CASE WHEN isfinite(corr(a, b)) THEN corr(a, b) END AS correlation
    FROM input
"""
_CONFUSION = """
    WITH kinds AS (SELECT count(DISTINCT a) <= 6 AND count(DISTINCT b) <= 6 AS is_few FROM input)
    SELECT CASE WHEN a IS NULL THEN 'NULL' WHEN is_few THEN a::VARCHAR
                WHEN a <= 0 THEN 'to 0' WHEN a < 0.5 THEN 'to 0.5' WHEN a < 1 THEN 'to 1'
                ELSE 'from 1' END AS a,
           CASE WHEN b IS NULL THEN 'NULL' WHEN is_few THEN b::VARCHAR
                WHEN b <= 0 THEN 'to 0' WHEN b < 0.5 THEN 'to 0.5' WHEN b < 1 THEN 'to 1'
                ELSE 'from 1' END AS b,
           count(*) AS rows
    FROM input, kinds GROUP BY 1, 2
    ORDER BY min(input.a) NULLS FIRST, min(input.b) NULLS FIRST, 1, 2
"""
_WITH_GROUPS = f"""
    WITH scored AS (SELECT * FROM input WHERE a IS NOT NULL AND b IS NOT NULL),
    each AS (
        SELECT group_id, task_id, experience_id, a, b,
            a - avg(a) OVER g AS a_gain, b - avg(b) OVER g AS b_gain,
            max(a) OVER g - a <= {_CLOSE} AS a_best, max(b) OVER g - b <= {_CLOSE} AS b_best
        FROM scored WINDOW g AS (PARTITION BY group_id)
    ),
    grouped AS (
        SELECT group_id, any_value(task_id) AS task_id, count(*) AS rows,
            max(a) - min(a) <= {_CLOSE} AS a_flat, max(b) - min(b) <= {_CLOSE} AS b_flat,
            count(*) FILTER (abs(a_gain) > {_CLOSE} AND abs(b_gain) > {_CLOSE}
                             AND (a_gain > 0) <> (b_gain > 0)) AS sign_changes,
            count(*) FILTER (a_best AND b_best) = 0 AS other_best,
            avg(a) AS a_mean, avg(b) AS b_mean
        FROM each GROUP BY group_id
    )
"""
_GROUPS = f"""{_WITH_GROUPS}
    SELECT count(*) AS groups, count(*) FILTER (sign_changes > 0) AS sign_changes,
        coalesce(sum(sign_changes), 0)::BIGINT AS rows_of_other_sign,
        count(*) FILTER (other_best) AS other_best,
        count(*) FILTER (NOT a_flat AND b_flat) AS become_flat,
        count(*) FILTER (a_flat AND NOT b_flat) AS become_informative
    FROM grouped
"""
_TASKS = f"""{_WITH_GROUPS}
    SELECT task_id, sum(rows)::BIGINT AS rows, count(*) AS groups,
        sum(a_mean * rows) / sum(rows) AS a_mean, sum(b_mean * rows) / sum(rows) AS b_mean,
        sum(sign_changes)::BIGINT AS rows_of_other_sign
    FROM grouped GROUP BY task_id
    HAVING abs(sum((b_mean - a_mean) * rows)) > {_CLOSE} OR sum(sign_changes) > 0
    ORDER BY abs(sum((b_mean - a_mean) * rows) / sum(rows)) DESC, sum(sign_changes) DESC, task_id
    LIMIT $limit
"""


@dataclass(frozen=True)
class Difference:
    """What changes when the reward `b` replaces `a`."""

    a: str
    b: str
    rows: Mapping[str, Any]
    """Counts of rows with each reward, and of those that change, rise and fall; means.

    The means and the correlation are of rows that have both.
    """
    confusion: Sequence[Mapping[str, Any]]
    """The number of rows for each pair of values, in ranges if there are many values."""
    groups: Mapping[str, Any]
    """Numbers of groups, of rows that have both: those in which an advantage (the reward less the
    group's mean) changes its sign, or another rollout is best; those that become flat, or
    informative.
    """
    tasks: Sequence[Mapping[str, Any]]
    """The tasks whose mean changes most."""


def compare(
    store: Store, a: str, b: str, *, where: str | None = None, tasks: int = 10
) -> Difference:
    """Compare two rewards: `reward`, the stored one, or side columns as `score:strict@2`.

    >>> compare(store, "reward", "reward").rows["changed"]
    0

    Raises NotFoundError when no value of one is stored, QueryError for an invalid name.
    """
    rows = _values(store, a, b, where)
    [message], [groups] = evaluate(_ROWS, rows).to_dicts(), evaluate(_GROUPS, rows).to_dicts()
    confusion = evaluate(_CONFUSION, rows).to_dicts()
    # `int`, as it becomes a part of the SQL
    most = evaluate(_TASKS.replace("$limit", str(int(tasks))), rows).to_dicts()
    return Difference(a, b, message, confusion, groups, most)


def changed_rows(
    store: Store, a: str, b: str, *, where: str | None = None, limit: int = 10
) -> pl.DataFrame:
    """Return rows whose rewards differ, those that differ most first, with their texts."""
    rows = _values(store, a, b, where)
    chosen = evaluate(
        "SELECT * FROM input WHERE a IS DISTINCT FROM b "
        f"ORDER BY abs(b - a) DESC NULLS LAST, experience_id LIMIT {int(limit)}",
        rows,
    )
    texts = store.scan("experiences").select("experience_id", "prompt_text", "response_text")
    ids = chosen["experience_id"].implode()
    found = texts.filter(pl.col("experience_id").is_in(ids)).collect()
    return chosen.join(found, on="experience_id", how="left", maintain_order="left")


def _values(store: Store, a: str, b: str, where: str | None) -> pl.DataFrame:
    """Return experience_id, task_id, group_id, a and b of all rows that are chosen."""
    # one version of all tables: both rewards are of the same rows
    past = store.at(store.versions())
    columns = [_column(name, alias) for name, alias in ((a, "a"), (b, "b"))]
    check(past, [c for c in columns if c is not None])
    columns_of(where or "true")  # raises unless it is one condition, which goes into a query
    read = from_sql([c for c in columns if c is not None])
    a_sql, b_sql = ("reward" if c is None else f'"{c.alias}"' for c in columns)
    return past.sql(
        f"SELECT experience_id, task_id, group_id, {a_sql}::DOUBLE AS a, {b_sql}::DOUBLE AS b "
        f"FROM {read} AS experiences WHERE ({where or 'true'}\n) ORDER BY experience_id"
    ).pl()


def _column(name: str, alias: str) -> SideColumn | None:
    if name == "reward":
        return None
    if ":" not in name:
        raise QueryError(
            f"`{name}` is not a reward{nearest(name, ('reward',))}; expected `reward`, or "
            "`score:NAME@VERSION`, as `rlake rescore` prints it"
        )
    column = parse(f"{alias}_of_the_comparison={name}" if "=" not in name else name)
    if column.value in ("label", "text"):
        raise QueryError(f"`{name}` is text, expected a number: `reward` or `score:NAME@VERSION`")
    return column
