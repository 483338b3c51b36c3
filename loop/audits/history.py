"""What the audits read of a store: one state of it, the rows of a run, and the bins of a column."""

import polars as pl

from ...store import Store
from ...store.errors import JobError, NotFoundError, nearest
from ...store.query import literal

LENGTH = "response_length(e.num_tokens, e.prompt_length, e.response_text)"
"""SQL of a response's length: in tokens, of rows of text in characters."""
MOST_BINS = 50
"""Bins of a column of names; rarer names are counted together."""
OTHERS = "(others)"
NONE = "(none)"


def of_run(store: Store, run_id: str, *, with_steps: bool = True) -> Store:
    """Return the store as it is now, so that all queries of an audit see one state of it.

    Raises NotFoundError, with the nearest name, when nothing is stored of the run, and JobError
    when it has trained no step and the question is about steps.
    """
    # pinned: a run that goes on, or a restore, would change the rows between two queries
    now = store if store.is_past else store.at(store.versions())
    name = literal(run_id)
    found = now.sql(
        f"SELECT (SELECT count(*) FROM draws_current WHERE run_id = {name}), "
        f"(SELECT count(*) FROM experiences WHERE run_id = {name}), "
        f"(SELECT count(*) FROM job_events WHERE run_id = {name})"
    ).fetchall()
    ((draws, rows, events),) = found
    if not (draws or rows or events):
        known = now.sql(
            "SELECT run_id FROM job_events UNION SELECT run_id FROM experiences "
            "WHERE run_id IS NOT NULL AND NOT contains(run_id, ':eval-')"
        ).fetchall()
        raise NotFoundError(f"no run `{run_id}`{nearest(run_id, [n for (n,) in known])}")
    if with_steps and not draws:
        raise JobError(
            f"run `{run_id}` has trained no step, expected at least one; it has {rows:,} rows: "
            "look at them with `rlake sql`, or wait for its first step"
        )
    return now


def named(column: str) -> pl.Expr:
    """Return a column of names as bins: NULL is a bin, and rare names are one."""
    name = pl.col(column).cast(pl.String).fill_null(NONE)
    rank = pl.len().over(name).rank("dense", descending=True)
    return pl.when(rank <= MOST_BINS).then(name).otherwise(pl.lit(OTHERS)).alias(column)


def quintiles(values: pl.Series) -> pl.Series:
    """Return numbers as bins of about equally many rows, such as `12-40`; NULL is a bin."""
    known = values.drop_nulls()
    if not len(known):
        return pl.Series(values.name, [NONE] * len(values), dtype=pl.String)
    # sets: equal numbers, as of answers of one token, share a bin
    edges = [known.quantile(q, "lower") for q in (0.0, 0.2, 0.4, 0.6, 0.8)]
    lows = sorted({int(edge) for edge in edges if edge is not None})
    highs = [*(low - 1 for low in lows[1:]), int(known.max())]  # type: ignore[arg-type]
    names = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(lows, highs, strict=True)]
    place = pl.Series(lows).search_sorted(values.cast(pl.Int64).fill_null(lows[0]), "right") - 1
    found = pl.Series(names).gather(place)
    return found.zip_with(values.is_not_null(), pl.Series([NONE])).alias(values.name)


def share(value: float) -> str:
    """Return a share as percent.

    >>> share(0.0512), share(0.9994), share(1.0)
    ('5.1 %', '99.9 %', '100 %')
    """
    percent = 100 * value
    return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.1f} %"
