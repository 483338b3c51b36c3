"""Invariants of each kind of operator, checked on its input and output.

- clean: the same ids in the same order; only the declared columns change, and keep their types.
- derive: the same ids in the same order; the declared columns are set, nothing else changes.
- filter: the ids are a subset of those given; each dropped id has a reason; other rows are
  unchanged, and a filter of whole groups keeps or drops each group as a whole.
- prioritize: as derive, with exactly one column, of numbers that are finite and not negative. NULL
  stays NULL: not computed.
- augment: the old rows are unchanged; each new row has a new id and the id of its parent, and
  belongs to no run: `run_id`, `batch` and `group_index` are NULL where these columns exist, since a
  run considers all rows with its `run_id` its own rollouts.
- reshape: rows become rows of another table; each refers to given rows, and each given row that no
  new row refers to has a reason.
"""

from collections.abc import Sequence

import polars as pl

from ..store.errors import OperatorError
from .kinds import KEEP, REASON, OperatorSpec

IDS = ("experience_id", "task_id")
"""Columns that may identify a row; the first that exists does."""

OF_A_RUN = ("run_id", "batch", "group_index")
"""Columns that say where in which run a row was explored; NULL in derived rows."""


def id_column(names: Sequence[str], op: OperatorSpec | None = None) -> str:
    """Return the id column of a frame with these columns.

    >>> id_column(["task_id", "experience_id"])
    'experience_id'
    """
    for name in IDS:
        if name in names:
            return name
    message = "rows have neither `experience_id` nor `task_id`; select one of them"
    raise op.error(message) if op else OperatorError(message)


def check_ids(rows: pl.DataFrame, what: str) -> None:
    """Raise OperatorError unless every row has a unique id."""
    key = id_column(rows.columns)
    if rows[key].null_count():
        raise OperatorError(
            f"{what}: `{key}` is NULL in {rows[key].null_count()} of {rows.height} rows"
        )
    if rows[key].n_unique() < rows.height:
        twice = rows.filter(pl.col(key).is_duplicated())[key][0]
        raise OperatorError(
            f"{what}: `{key}` {twice!r} is there more than once, expected one row an id"
        )


def check_produced(op: OperatorSpec, before: pl.DataFrame, produced: pl.DataFrame) -> None:
    """Check the rows that the body of a filter, augment or reshape returned."""
    key = id_column(before.columns, op)
    needed = {"filter": (key,), "augment": ("parent_id",), "reshape": op.links}.get(op.kind, ())
    for name in needed:
        _has(op, produced, name)
    if op.kind == "filter":
        _no_strangers(op, produced[key], before[key], key)
        _unique(op, produced, key)
        _unchanged(op, before, produced)
    if op.kind == "augment":
        extra = [c for c in produced.columns if c not in (*before.columns, "parent_id")]
        if extra:
            raise op.error(
                f"its new rows have the column `{extra[0]}`, which the given rows do not have; use "
                "a derive"
            )


def check(
    op: OperatorSpec, before: pl.DataFrame, after: pl.DataFrame, dropped: pl.DataFrame
) -> None:
    """Raise OperatorError, with the operator and the invariant, if it is broken."""
    if op.kind == "filter":
        _check_filter(op, before, after, dropped)
    elif op.kind == "augment":
        _check_augment(op, before, after)
    elif op.kind == "reshape":
        _check_reshape(op, before, after, dropped)
    else:
        _check_same_ids(op, before, after)
        if op.kind == "prioritize":
            _check_priority(op, after)


def _check_same_ids(op: OperatorSpec, before: pl.DataFrame, after: pl.DataFrame) -> None:
    key = id_column(before.columns, op)
    _has(op, after, key)
    if not before[key].equals(after[key]):
        raise op.error(f"a {op.kind} keeps the same ids in the same order, but `{key}` changed")
    if op.kind == "prioritize" and len(op.writes) != 1:
        raise op.error(f"a prioritize sets exactly one column, it declares {list(op.writes)}")
    for name in op.writes:
        _has(op, after, name)
    _unchanged(op, before, after)
    if op.kind == "clean":
        for name in op.writes:
            was, is_ = before.schema.get(name, "not there"), after.schema[name]
            if was != is_:
                raise op.error(
                    f"a clean changes values, not types, but `{name}` was {was} and is {is_}; "
                    "use a derive"
                )


def _check_filter(
    op: OperatorSpec, before: pl.DataFrame, after: pl.DataFrame, dropped: pl.DataFrame
) -> None:
    key = id_column(before.columns, op)
    if after.height + dropped.height != before.height:
        raise op.error(
            f"a filter keeps or drops each row once, but made {after.height} and {dropped.height} "
            f"of {before.height}"
        )
    _reasons(op, dropped, key)
    if op.whole_groups and "group_id" in before.columns:
        gone = before.join(dropped, on=key, how="semi")["group_id"]
        cut = after.filter(pl.col("group_id").is_in(gone.unique().implode(), nulls_equal=True))
        if cut.height:
            raise op.error(f"it declares `whole_groups`, but cut the group {cut['group_id'][0]!r}")


def _check_priority(op: OperatorSpec, after: pl.DataFrame) -> None:
    [column] = op.writes
    key = id_column(after.columns, op)
    if not after.schema[column].is_numeric():
        raise op.error(f"`{column}` must be a number, got {after.schema[column]}")
    value = pl.col(column).cast(pl.Float64)
    bad = after.filter(~(value.is_finite() & (value >= 0)))
    if bad.height:
        raise op.error(
            f"`{column}` must be finite and not negative, got {bad[column][0]!r} for {key} "
            f"{bad[key][0]!r} and {bad.height - 1} other rows"
        )


def _check_augment(op: OperatorSpec, before: pl.DataFrame, after: pl.DataFrame) -> None:
    key = id_column(before.columns, op)
    _unchanged(op, before, after.head(before.height))
    # New rows follow the old ones, which were compared above; only the tail is new.
    new = after.tail(after.height - before.height)
    _unique(op, after, key)
    _no_strangers(op, new["parent_id"], before[key], "parent_id")
    for name in OF_A_RUN:
        if name in new.columns and new[name].count():
            raise op.error(
                f"its new rows belong to no run, expected `{name}` NULL, got "
                f"{new[name].drop_nulls()[0]!r}; `parent_id` tells where they come from"
            )


def _check_reshape(
    op: OperatorSpec, before: pl.DataFrame, after: pl.DataFrame, dropped: pl.DataFrame
) -> None:
    key = id_column(before.columns, op)
    for name in op.links:
        _no_strangers(op, after[name], before[key], name)
    _reasons(op, dropped, key)


def _has(op: OperatorSpec, rows: pl.DataFrame, column: str) -> None:
    if column not in rows.columns:
        raise op.error(f"its rows have no column `{column}`, expected one")


def _unique(op: OperatorSpec, rows: pl.DataFrame, key: str) -> None:
    if rows[key].null_count() or rows[key].n_unique() < rows.height:
        twice = rows.filter(pl.col(key).is_duplicated() | pl.col(key).is_null())[key][0]
        raise op.error(f"`{key}` {twice!r} is not the id of one row; each new row needs a fresh id")


def _no_strangers(op: OperatorSpec, named: pl.Series, known: pl.Series, column: str) -> None:
    # most often all rows are the given ones, and comparing costs less than a join
    if named.equals(known) and not known.null_count():
        return
    given = known.drop_nulls().to_frame(column)
    strange = named.to_frame(column).join(given, on=column, how="anti", maintain_order="left")
    if strange.height:
        raise op.error(
            f"`{column}` holds {strange[column][0]!r}, which is not the id of a row that was given"
        )


def _reasons(op: OperatorSpec, dropped: pl.DataFrame, key: str) -> None:
    without = dropped.filter(pl.col("reason").is_null() | (pl.col("reason") == ""))
    if without.height:
        raise op.error(f"{key} {without[key][0]!r} was dropped without a reason")


def _unchanged(op: OperatorSpec, before: pl.DataFrame, after: pl.DataFrame) -> None:
    """Check that columns which the operator did not declare are unchanged, in any order of rows."""
    key = id_column(before.columns, op)
    marks = {"filter": (KEEP, REASON), "augment": ("parent_id",)}.get(op.kind, ())
    extra = [c for c in after.columns if c not in (*before.columns, *op.writes, *marks)]
    if extra:
        raise op.error(f"it added the column `{extra[0]}` without declaring it in `writes`")
    if not before[key].equals(after[key]):
        before = after.select(key).join(before, on=key, how="left", maintain_order="left")
    for name in before.columns:
        if name in op.writes:
            continue
        _has(op, after, name)
        if not before[name].equals(after[name], check_dtypes=True):
            raise op.error(f"it changed the column `{name}` without declaring it in `writes`")
