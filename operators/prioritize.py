"""Priorities: one number for each row; rows with larger priorities are drawn more often.

Each operator sets `priority`, or the column `into`, so that several can be combined:
`freshness(into="fresh")`, `novelty(into="novel")`, then `priority(expression="fresh *
sqrt(novel)")`. A pipeline with the sink `experience_values` stores priorities, and a trainer draws
by them with `side_columns: [priority=derived:priority]`.
"""

from datetime import UTC, datetime
from typing import Any, Literal

import polars as pl

from ..store.errors import OperatorError
from .body import Declared, Value, by_name
from .decorator import operator
from .parameters import NotNegative, Positive
from .reward_shaping import passing


@operator("prioritize", writes=("priority",))
def priority(*, expression: str) -> Value:
    """Set `priority` to an SQL expression (DuckDB's dialect) over the row's columns.

    Parts of the reward and metrics are read by name, as `metrics['seconds']`. NULL means not
    computed and stays NULL. A value that is negative or not finite is an error.

    >>> import polars as pl
    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "reward": [0.25, None]})
    >>> rows.pipe(priority(expression="1 - reward"))["priority"].to_list()
    [0.75, None]
    """
    return Value(f"({by_name(expression, what='expression')})::DOUBLE")


@operator("prioritize")
def freshness(
    *,
    half_life: Positive,
    by: Literal["policy_version", "batch", "created_at"] = "policy_version",
    newest: float | str | None = None,
    into: str = "priority",
) -> Declared:
    """Set the priority to 0.5 ^ (age / half_life): a row of that age counts half.

    The age is the distance to `newest`: in optimizer steps (`policy_version`), in batches of the
    explorer (`batch`), or in seconds (`created_at`, where `newest` is a time such as
    "2026-01-31T12:00:00+00:00"). `newest` defaults to the largest value of all rows; newer rows
    have age 0. NULL stays NULL.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "policy_version": [8, 4]})
    >>> rows.pipe(freshness(half_life=2.0))["priority"].to_list()
    [1.0, 0.25]
    """
    column = pl.col(by)
    # Without a time given, age counts from the newest row here, so a second call gives the same.
    last = column.max() if newest is None else pl.lit(_newest(newest, by))
    behind: Any = last - column
    age = behind.dt.total_microseconds() / 1e6 if by == "created_at" else behind.cast(pl.Float64)
    value = pl.lit(0.5).pow(age.clip(lower_bound=0.0) / half_life)
    return _as(value, into)


@operator("prioritize")
def absolute_advantage(*, epsilon: NotNegative = 0.0, into: str = "priority") -> Declared:
    """Set the priority to |advantage| + epsilon.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "advantage": [-0.5, None]})
    >>> rows.pipe(absolute_advantage(epsilon=0.125))["priority"].to_list()
    [0.625, None]
    """
    return _as(pl.col("advantage").abs() + epsilon, into)


@operator("prioritize")
def td_error(
    *,
    prediction: str,
    target: str = "advantage",
    epsilon: NotNegative = 0.0,
    into: str = "priority",
) -> Declared:
    """Set the priority to |target - prediction| + epsilon (proportional, arXiv:1511.05952).

    Both are columns: the outcome of a row, and the expected outcome, such as a critic's value, the
    group's mean, or an earlier pass rate of the task.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "reward": [1.0], "pass_rate": [0.25]})
    >>> rows.pipe(td_error(target="reward", prediction="pass_rate"))["priority"].to_list()
    [0.75]
    """
    error = (pl.col(target) - pl.col(prediction)).cast(pl.Float64).abs()
    return _as(error + epsilon, into)


@operator("prioritize", whole_groups=True)
def near_half(
    *, accuracy: str = "reward", threshold: float = 0.5, into: str = "priority"
) -> Declared:
    """Set the priority to 4 p (1 - p) with the group's pass rate p: 1 at a half, 0 at 0 and 1.

    This is the variance of a pass, scaled to 1: groups whose answers differ most come first.
    `accuracy` and `threshold` are as in `pass_rate`.

    >>> rows = pl.DataFrame({"experience_id": list("abcd"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, 0.0, 0.0]})
    >>> rows.pipe(near_half())["priority"].to_list()
    [0.75, 0.75, 0.75, 0.75]
    """
    rate = passing(accuracy, threshold)
    return Declared(body=Value(f"4 * {rate} * (1 - {rate})"), writes=(into,))


@operator("prioritize")
def rarity(
    *, column: str = "response_text", within: str = "group_id", into: str = "priority"
) -> Declared:
    """Set the priority to 1 / (how many rows of the same group have the same value).

    `within` names another column than `group_id` to compare in, such as `task_id`. NULL stays NULL.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "group_id": "g",
    ...                      "response_text": ["4", "4", "5"]})
    >>> rows.pipe(rarity())["priority"].to_list()
    [0.5, 0.5, 1.0]
    """
    same = pl.len().over(column, within).cast(pl.Float64)
    made = _as(pl.when(pl.col(column).is_not_null()).then(1 / same), into)
    return Declared(body=made.body, writes=(into,), scope=seen_within(within))


def seen_within(column: str) -> str:
    """Return the scope of an operator that compares rows with the same value of a column."""
    return "group" if column == "group_id" else "all"


def _as(value: pl.Expr, into: str) -> Declared:
    return Declared(body=value.alias(into), writes=(into,))


def _newest(newest: float | str, by: str) -> float | datetime:
    if by != "created_at":
        if isinstance(newest, str):
            raise OperatorError(f"`newest` of `freshness` by `{by}` is a number, got {newest!r}")
        return newest
    try:
        time = datetime.fromisoformat(newest)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise OperatorError(
            f"`newest` of `freshness` by `created_at` is a time such as "
            f"`2026-01-31T12:00:00+00:00`, got {newest!r}"
        ) from error
    # The store keeps all times in UTC, and so a time without a zone is one.
    return time if time.tzinfo else time.replace(tzinfo=UTC)
