"""Rescore stored rows with a reward function; its verdicts become rows of `scores`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

import numpy as np
import polars as pl

from ..operators.reward_protocol import Spec, looks_at
from ..operators.scoring import TIMEOUT, reward_of, score_rows
from ..operators.source_digest import digest
from ..store import Store
from ..store.query import columns_of, is_in, literal
from ..store.schema_versions import take
from .running.partition import cut

_ROWS = 256
"""Rows that are judged and stored together; after a kill, at most these are judged again."""
_ROWS_WAITED_FOR = 64
"""The same for an `async` reward: a request that is repeated may cost money."""


@dataclass(frozen=True)
class Rescored:
    """The verdicts of a scorer, compared with the rewards that the rows were stored with."""

    scorer: str
    version: str
    rows: int
    """Rows with a verdict of this scorer and version, including those of earlier calls."""
    new: int
    """Verdicts stored by this call."""
    failed: int
    """Rows on which the reward function failed; `detail` in `scores` says why."""
    changed: int
    """Rows whose verdict differs from their stored reward; NULL differs from every number."""
    better: int
    worse: int
    reward_mean: float | None
    """Mean of the stored rewards of rows that have a verdict."""
    value_mean: float | None
    """Mean of the verdicts."""
    failure: str | None = None
    """The error of one of the rows that failed."""


def rescore(
    store: Store,
    reward: Spec,
    *,
    version: str | None = None,
    where: str | None = None,
    max_concurrency: int = 16,
    timeout: float = TIMEOUT,
    listener: Callable[[int, int], None] | None = None,
) -> Rescored:
    """Judge stored rows by a reward function, and store its verdicts in `scores`.

    `reward` is the name of a built-in reward, `package.module:function`, or `{name: parameters}`;
    `version` defaults to a digest of its source and parameters. Rows that this scorer and version
    already judged are skipped, so the same call continues one that was killed. A row on which the
    function raises gets the value NULL, and the error as `detail`; another `version` judges it
    again. At most `max_concurrency` calls of an `async` function run at once, each for `timeout`
    seconds. A judge of groups gets whole groups, even if `where` selects some of their rows.
    `listener` is called with the number of rows that are done, and of all rows to judge.

    Raises OperatorError for an unknown function or parameter, QueryError when `where` is not a
    condition.
    """
    scorer, function = reward_of(reward)
    version = version or digest(function)
    columns_of(where or "true")  # raises unless it is one condition, which goes into a query
    verdict = f"scorer = {literal(scorer)} AND scorer_version = {literal(version)}"
    # one version of all tables: rows that a run appends meanwhile are left to the next call
    past = store.at(store.versions())
    chosen = f"SELECT experience_id FROM experiences WHERE ({where or 'true'}\n)"
    unjudged = past.sql(
        f"SELECT experience_id, group_id FROM experiences WHERE experience_id IN ({chosen}) "
        f"AND experience_id NOT IN (SELECT experience_id FROM scores WHERE {verdict})"
    ).pl()
    done, by_group = 0, looks_at(function) == "group"
    for ids in _parts(past, unjudged, by_group=by_group, size=_size(function)):
        rows = _rows(past, ids)
        verdicts = score_rows(
            function, rows.iter_rows(named=True), max_concurrency=max_concurrency, timeout=timeout
        )
        made = rows.select(
            "experience_id",
            scorer=pl.lit(scorer),
            scorer_version=pl.lit(version),
            value=pl.Series([value for (value, _), _ in verdicts], dtype=pl.Float64),
            detail=pl.Series([error or why for (_, why), error in verdicts], dtype=pl.String),
        ).join(unjudged, on="experience_id", how="semi", maintain_order="left")
        # one commit a part: a kill loses the verdicts of one part, and the next call continues
        store.append("scores", made)
        done += made.height
        if listener is not None:
            listener(done, unjudged.height)
    return _compared(store, scorer, version, chosen, verdict, done)


def _size(function: Callable[..., Any]) -> int:
    """Return the number of rows that are judged and stored together."""
    inner = function.func if isinstance(function, partial) else function
    return _ROWS_WAITED_FOR if iscoroutinefunction(inner) else _ROWS


def _parts(
    store: Store, unjudged: pl.DataFrame, *, by_group: bool, size: int
) -> Iterator[pl.DataFrame]:
    """Yield parts of the rows by their addresses; with `by_group`, each part has whole groups."""
    light = store.dataset("experiences").to_table(
        columns=["experience_id", "group_id"], with_row_id=True
    )
    # of a group with one unjudged row all rows are read, since its judge compares them
    key = "group_id" if by_group else "experience_id"
    wanted = pl.DataFrame(pl.from_arrow(light)).join(unjudged, on=key, how="semi").sort("_rowid")
    groups = wanted["group_id"] if by_group else None
    for places in cut(np.ones(wanted.height), part_bytes=size, groups=groups):
        yield wanted[places]


def _rows(store: Store, part: pl.DataFrame) -> pl.DataFrame:
    """Return rows of `experiences` with the columns of their tasks that a reward may read."""
    dataset = store.dataset("experiences")
    # all columns: nobody declares which of them a reward function reads
    payload = take(dataset, part["_rowid"].to_list(), dataset.schema.names)
    rows = pl.DataFrame(pl.from_arrow(payload))
    found = store.dataset("tasks").to_table(
        columns=["task_id", "answer", "messages", "metadata"],
        filter=is_in("task_id", rows["task_id"].unique()),
    )
    names = {"messages": "task_messages", "metadata": "task_metadata"}
    tasks = pl.DataFrame(pl.from_arrow(found)).rename(names)
    return rows.join(tasks, on="task_id", how="left", maintain_order="left")


def _compared(
    store: Store, scorer: str, version: str, chosen: str, verdict: str, new: int
) -> Rescored:
    [found] = store.sql(
        "SELECT count(*), count(*) FILTER (value IS NULL AND detail IS NOT NULL), "
        "count(*) FILTER (value IS DISTINCT FROM reward), count(*) FILTER (value > reward), "
        "count(*) FILTER (value < reward), avg(reward) FILTER (value IS NOT NULL), avg(value), "
        "min(detail) FILTER (value IS NULL) "
        f"FROM scores JOIN experiences USING (experience_id) "
        f"WHERE {verdict} AND experience_id IN ({chosen})"
    ).fetchall()
    rows, *counts_and_means = found
    return Rescored(scorer, version, rows, new, *counts_and_means)
