"""Rescoring: a reward function over rows that are stored, as verdicts beside their rewards."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import polars as pl

from ..operators.provenance import digest
from ..operators.scoring import judged
from ..store import Store
from ..store.query import columns_of, literal
from .rollouts import rewards_of

_ROWS = 256
"""Rows judged and stored together: so many are in memory, and are judged again after a kill."""


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
    """Of the stored rewards."""
    value_mean: float | None
    """Of the verdicts."""
    failure: str | None = None
    """What went wrong at one of the rows that could not be judged."""


def rescore(
    store: Store,
    reward: str,
    *,
    version: str | None = None,
    where: str | None = None,
    listener: Callable[[int, int], None] | None = None,
) -> Rescored:
    """Judge stored rows by a reward function, and store what it says in `scores`.

    `reward` is the name of one of ours or `package.module:function`; `version` says which state of
    it, else a digest of its source does. Rows that this scorer and version judged before are
    passed over, so that a killed call is gone on with by the same call. A row for which the
    function raises has the value NULL, and the error as `detail`. `listener` is told how many of
    how many rows are done.

    Raises ConfigError when there is no such function, QueryError when `where` is no condition.
    """
    [(scorer, (function, _))] = rewards_of(reward).items()
    version = version or digest(function)
    columns_of(where or "true")  # or it is no condition
    verdict = f"scorer = {literal(scorer)} AND scorer_version = {literal(version)}"
    past = store.at(store.versions())
    chosen = f"SELECT experience_id FROM experiences WHERE ({where or 'true'}\n)"
    unjudged = past.sql(
        f"{chosen} AND experience_id NOT IN (SELECT experience_id FROM scores WHERE {verdict})"
    ).pl()
    done = 0
    for rows in _batches(past, unjudged):
        verdicts = list(judged(function, rows.iter_rows(named=True)))
        made = rows.select(
            "experience_id",
            scorer=pl.lit(scorer),
            scorer_version=pl.lit(version),
            value=pl.Series([value for value, _ in verdicts], dtype=pl.Float64),
            detail=pl.Series([detail for _, detail in verdicts], dtype=pl.String),
        )
        store.append("scores", made)
        done += rows.height
        if listener is not None:
            listener(done, unjudged.height)
    return _compared(store, scorer, version, chosen, verdict, done)


def _batches(store: Store, ids: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield rows of `experiences` with what a reward may ask of their tasks."""
    dataset = store.dataset("experiences")
    light = dataset.to_table(columns=["experience_id"], with_row_id=True)
    places = pl.DataFrame(pl.from_arrow(light)).join(ids, on="experience_id", how="semi")
    for part in places["_rowid"].sort().to_frame().iter_slices(_ROWS):
        payload = dataset._take_rows(  # pyright: ignore[reportPrivateUsage]
            part["_rowid"].to_list(), columns=dataset.schema.names
        )
        rows = pl.DataFrame(pl.from_arrow(payload))
        tasks = ", ".join(literal(i) for i in rows["task_id"].unique())
        told = store.dataset("tasks").to_table(
            columns=["task_id", "answer", "messages", "metadata"], filter=f"task_id IN ({tasks})"
        )
        asked = pl.DataFrame(pl.from_arrow(told)).rename(
            {"messages": "task_messages", "metadata": "task_metadata"}
        )
        yield rows.join(asked, on="task_id", how="left", maintain_order="left")


def _compared(
    store: Store, scorer: str, version: str, chosen: str, verdict: str, new: int
) -> Rescored:
    [found] = store.sql(
        "SELECT count(*), count(*) FILTER (value IS NULL AND detail IS NOT NULL), "
        "count(*) FILTER (value IS DISTINCT FROM reward), count(*) FILTER (value > reward), "
        "count(*) FILTER (value < reward), avg(reward), avg(value), "
        "min(detail) FILTER (value IS NULL) "
        f"FROM scores JOIN experiences USING (experience_id) "
        f"WHERE {verdict} AND experience_id IN ({chosen})"
    ).fetchall()
    rows, *counts_and_means = found
    return Rescored(scorer, version, rows, new, *counts_and_means)
