"""Rescoring: a reward function over rows that are stored, as verdicts beside their rewards."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

import polars as pl

from ..operators.reward_protocol import Spec, looks_at
from ..operators.scoring import SECONDS, reward_of, scored
from ..operators.source_digest import digest
from ..store import Store
from ..store.query import columns_of, literal

_ROWS = 256
"""Rows judged and stored together: so many are in memory, and are judged again after a kill."""
_ROWS_WAITED_FOR = 64
"""The same, of an `async` reward: an answer that is asked for again may cost money."""


@dataclass(frozen=True)
class Rescored:
    """What a scorer says of the rows, against the reward that they were stored with."""

    scorer: str
    version: str
    rows: int
    """Rows with a verdict of this scorer and version, those of earlier calls included."""
    new: int
    """Verdicts stored by this call."""
    failed: int
    """Rows that the reward function could not judge: `detail` of their `scores` says why."""
    changed: int
    """Rows whose verdict is not their stored reward; NULL is a value of its own."""
    better: int
    worse: int
    reward_mean: float | None
    """Of the stored rewards of the rows that have a verdict."""
    value_mean: float | None
    """Of the verdicts."""
    failure: str | None = None
    """What went wrong at one of the rows that could not be judged."""


def rescore(
    store: Store,
    reward: Spec,
    *,
    version: str | None = None,
    where: str | None = None,
    at_once: int = 16,
    seconds: float = SECONDS,
    listener: Callable[[int, int], None] | None = None,
) -> Rescored:
    """Judge stored rows by a reward function, and store what it says in `scores`.

    `reward` is the name of one of ours or `package.module:function`, or `{name: parameters}`;
    `version` says which state of it, else a digest of its source and parameters does. Rows that
    this scorer and version judged before are passed over, so that a killed call is gone on with by
    the same call. A row for which the function raises has the value NULL, and the error as
    `detail`; another `version` judges it again. Of an `async` function, at most `at_once` calls are
    under way, each for `seconds`; a judge of groups is given each group whole, also where `where`
    chooses some of its rows.
    `listener` is told how many of how many rows are done.

    Raises OperatorError when there is no such function or parameter, QueryError when `where` is no
    condition.
    """
    scorer, function = reward_of(reward)
    version = version or digest(function)
    columns_of(where or "true")  # or it is no condition
    verdict = f"scorer = {literal(scorer)} AND scorer_version = {literal(version)}"
    past = store.at(store.versions())
    chosen = f"SELECT experience_id FROM experiences WHERE ({where or 'true'}\n)"
    unjudged = past.sql(
        f"SELECT experience_id, group_id FROM experiences WHERE experience_id IN ({chosen}) "
        f"AND experience_id NOT IN (SELECT experience_id FROM scores WHERE {verdict})"
    ).pl()
    done, by_group = 0, looks_at(function) == "group"
    for ids in _parts(past, unjudged, by_group=by_group, size=_size(function)):
        rows = _rows(past, ids)
        verdicts = scored(function, rows.iter_rows(named=True), at_once=at_once, seconds=seconds)
        made = rows.select(
            "experience_id",
            scorer=pl.lit(scorer),
            scorer_version=pl.lit(version),
            value=pl.Series([value for value, _ in verdicts], dtype=pl.Float64),
            detail=pl.Series([detail for _, detail in verdicts], dtype=pl.String),
        ).join(unjudged, on="experience_id", how="semi", maintain_order="left")
        store.append("scores", made)
        done += made.height
        if listener is not None:
            listener(done, unjudged.height)
    return _compared(store, scorer, version, chosen, verdict, done)


def _size(function: Callable[..., Any]) -> int:
    """Return how many rows are judged and stored together: fewer, where judging waits."""
    inner = function.func if isinstance(function, partial) else function
    return _ROWS_WAITED_FOR if iscoroutinefunction(inner) else _ROWS


def _parts(
    store: Store, unjudged: pl.DataFrame, *, by_group: bool, size: int
) -> Iterator[pl.DataFrame]:
    """Yield the row addresses of parts of the rows; of groups to be judged, all rows of some."""
    dataset = store.dataset("experiences")
    light = dataset.to_table(columns=["experience_id", "group_id"], with_row_id=True)
    places = pl.DataFrame(pl.from_arrow(light)).select("_rowid", "experience_id", "group_id")
    if not by_group:
        wanted = places.join(unjudged, on="experience_id", how="semi").sort("_rowid")
        yield from wanted.iter_slices(size)
        return
    wanted = places.join(unjudged, on="group_id", how="semi").sort("_rowid")
    waiting: list[pl.DataFrame] = []
    for _, group in wanted.group_by("group_id", maintain_order=True):
        waiting.append(group)
        if sum(map(len, waiting)) >= size:
            yield pl.concat(waiting)
            waiting = []
    if waiting:
        yield pl.concat(waiting)


def _rows(store: Store, part: pl.DataFrame) -> pl.DataFrame:
    """Return rows of `experiences` with what a reward may ask of their tasks."""
    dataset = store.dataset("experiences")
    payload = dataset._take_rows(  # pyright: ignore[reportPrivateUsage]
        part["_rowid"].to_list(), columns=dataset.schema.names
    )
    rows = pl.DataFrame(pl.from_arrow(payload))
    tasks = ", ".join(literal(i) for i in rows["task_id"].unique())
    message = store.dataset("tasks").to_table(
        columns=["task_id", "answer", "messages", "metadata"], filter=f"task_id IN ({tasks})"
    )
    asked = pl.DataFrame(pl.from_arrow(message)).rename(
        {"messages": "task_messages", "metadata": "task_metadata"}
    )
    return rows.join(asked, on="task_id", how="left", maintain_order="left")


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
