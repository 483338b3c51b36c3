"""Outcomes of rollouts: of each batch of this run, and of earlier runs."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from ....store import Store
from ....store.changes import ChangeFeed
from ....store.errors import JobError, QueryError, nearest
from ....store.query import literal

_READ = ("task_id", "group_id", "rollout_index", "reward", "rewards", "metrics")


def right(name: str | None, pass_threshold: float) -> pl.Expr:
    """Return whether a rollout passed, as 1.0 or 0.0; NULL when it has no reward.

    `name` is the entry of `metrics` or `rewards` that decides; None: the one called `accuracy`, or
    else the reward.
    """
    message = pl.coalesce(
        *(_entry(column, name or "accuracy") for column in ("metrics", "rewards"))
    )
    value = message if name else pl.coalesce(message, "reward")
    return (value >= pass_threshold).cast(pl.Float64)


def _entry(column: str, name: str) -> pl.Expr:
    named = pl.element().struct.field("value").filter(pl.element().struct.field("name") == name)
    return pl.col(column).list.eval(named).list.first()


@dataclass(frozen=True)
class PassRule:
    """When a rollout of some tasks passed."""

    tasks: Collection[str]
    """The tasks' IDs."""
    metric: str | None
    """The entry of `metrics` or `rewards` that decides; None: `accuracy`, or else the reward."""
    threshold: float
    """From which value on it passed."""


def outcomes(rows: pl.DataFrame, rule: PassRule) -> pl.DataFrame:
    """Return `task_id`, `passes` and `rollouts` of the rule's tasks that have a reward.

    A rollout that became several rows counts once, with their mean.
    """
    own = rows.filter(pl.col("task_id").is_in(list(rule.tasks)))
    judged = own.with_columns(right=right(rule.metric, rule.threshold))
    rollouts = judged.group_by("task_id", "group_id", "rollout_index").agg(pl.col("right").mean())
    # Sorted, so that sums do not depend on the order in which the rows are stored.
    rollouts = rollouts.drop_nulls("right").sort("task_id", "group_id", "rollout_index")
    return rollouts.group_by("task_id", maintain_order=True).agg(
        passes=pl.col("right").sum(), rollouts=pl.len().cast(pl.Float64)
    )


class History:
    """Reads the outcomes of each batch of a run once, when the batch is complete."""

    def __init__(self, store: Store, run_id: str, rules: Sequence[PassRule], *, after: int) -> None:
        """Start with the batch after `after`; each task has one rule."""
        self._store, self._rules = store, rules
        self._done = after
        self._tail = ChangeFeed(["batch", *_READ], run_id=run_id)
        self._rows: pl.DataFrame | None = None

    def until(self, batch: int) -> Iterator[tuple[int, pl.DataFrame]]:
        """Yield the number and the outcomes of each batch before `batch` that was not yielded yet.

        Raises JobError when the configured entry is in no row of a batch.
        """
        self._read()
        while self._done < batch - 1:
            self._done += 1
            assert self._rows is not None, "they were read"
            of_batch = self._rows.filter(pl.col("batch") == self._done)
            self._rows = self._rows.filter(pl.col("batch") > self._done)
            yield self._done, pl.concat(self._outcomes(of_batch, rule) for rule in self._rules)

    def _outcomes(self, of_batch: pl.DataFrame, rule: PassRule) -> pl.DataFrame:
        found = outcomes(of_batch, rule)
        if rule.metric and found.is_empty():
            self._check(of_batch.filter(pl.col("task_id").is_in(list(rule.tasks))), rule.metric)
        return found

    def _read(self) -> None:
        new = _frame(self._tail.read(self._store.dataset("experiences")))
        known = [] if self._rows is None or self._tail.restarted else [self._rows]
        self._rows = pl.concat([*known, new]).filter(pl.col("batch") > self._done)

    def _check(self, rows: pl.DataFrame, name: str) -> None:
        # Without any entry, the batch could not be judged, and the name may be right.
        there = {
            entry["name"]
            for column in ("metrics", "rewards")
            for entries in rows[column].drop_nulls()
            for entry in entries
        }
        if there and name not in there:
            raise JobError(
                f"no row of batch {self._done} has `{name}` in `metrics` or `rewards`, as "
                f"`tasks.pass_metric` says{nearest(name, there)}"
            )


def before(store: Store, run_id: str, rule: PassRule, condition: str) -> pl.DataFrame:
    """Return the outcomes of other runs' rollouts, for rows that match a condition."""
    query = (
        f"SELECT {', '.join(_READ)} FROM experiences WHERE ({condition}\n) "
        f"AND run_id IS DISTINCT FROM {literal(run_id)}"
    )
    try:
        rows = store.sql(query).to_arrow_table()
    except QueryError as error:
        raise QueryError(f"`history` of `tasks.selector`: {error}") from error
    return outcomes(_frame(rows), rule)


def _frame(rows: pa.Table) -> pl.DataFrame:
    frame = pl.DataFrame(pl.from_arrow(rows))
    return frame.drop("_rowid", strict=False)
