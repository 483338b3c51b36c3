"""Why the mean reward of a run changed between two ranges of steps.

Splits the change over tasksets, tasks, reward parts, lengths, finish reasons, lags, versions and
sources, so that the shares of each split add up to the whole. A split describes and does not prove
a cause: rewards that fall with the length may fall because of it, or together with it.
"""

import re
from dataclasses import dataclass
from typing import Any

import polars as pl

from ...store import Store
from ...store.errors import JobError, QueryError
from ...store.query import literal
from .clustered import ALPHA, Z, p_value, two_means
from .history import NONE, named, of_run, quintiles, share

DIMENSIONS = (
    *("taskset", "task_id", "finish_reason", "length", "lag", "policy_version"),
    *("source", "engine"),
)
"""What the change is split by, in addition to the parts of the reward."""
LEAST_SHARE = 0.1
"""Parts that explain less of the change are no findings."""
SHOWN = 10
"""Bins of each split that are returned, those that explain most."""
_RANGE = re.compile(r"(\d+)(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Drop:
    """How the mean reward changed from one range of steps to another, and what explains it."""

    run_id: str
    steps: tuple[int, int]
    """The range that is asked about, both ends included."""
    against: tuple[int, int]
    """The range that it is compared with."""
    num_rows: tuple[int, int]
    """Rows with a reward, of `against` and of `steps`."""
    reward_mean: tuple[float, float]
    """The mean reward of `against`, and of `steps`."""
    change: float
    low: float
    """Bounds of the 95 % interval of the change, with the rows of a group as one cluster."""
    high: float
    p: float
    splits: list[dict[str, Any]]
    """A row a bin of a dimension: its part of the `change`, made of `within` (its own mean changed)
    and `mix` (its share of the rows changed), its `share` of the whole, its `excess`, which is that
    share less the bin's share of the rows, and the p of the excess. The dimension `part` has one
    row a part of the reward, and what no part explains."""
    findings: list[str]
    """What explains a change that exceeds chance; empty when the change does not."""


def parse_steps(text: str, option: str) -> tuple[int, int]:
    """Return the ends of a range of steps, both included; `A` is `A:A`.

    >>> parse_steps("20:39", "--steps"), parse_steps("7", "--steps")
    ((20, 39), (7, 7))

    Raises QueryError for what is not a range.
    """
    found = _RANGE.fullmatch(text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise QueryError(
            f"`{option}` must be two steps such as `20:39`, the first not after the last, got "
            f"`{text}`"
        )
    return first, last


def drop(store: Store, run_id: str, steps: tuple[int, int], against: tuple[int, int]) -> Drop:
    """Explain how the mean reward of the rows trained on changed from `against` to `steps`.

    The part of a bin is w·Δm + (m - M)·Δw, with the average of both ranges for its share of the
    rows w, its mean m and the whole mean M: the first term is `within`, the second `mix`, and over
    all bins both add up to the whole change. Bins are findings when the whole change has p < 0.001,
    and they explain more of it than their share of the rows would, by at least a tenth of the
    change and with p < 0.001 after Bonferroni's correction over the bins of their dimension.

    Raises NotFoundError for an unknown run, and JobError when a range has no rewards.
    """
    now = of_run(store, run_id)
    rows = _rows(now, run_id, steps, against)
    before, after = (rows.filter(pl.col("is_after") == side) for side in (False, True))
    for part, (first, last) in ((before, against), (after, steps)):
        if not part.height:
            raise _nothing(now, run_id, first, last)
    # whole groups: their rollouts share a task, and fare alike
    change, error = two_means(before, after, pl.col("reward"), cluster="group_id")
    means = [float(part["reward"].mean()) for part in (before, after)]  # type: ignore[arg-type]
    p = _p_of(change, error)
    splits = [
        row
        for dimension in DIMENSIONS
        if rows[dimension].n_unique() > 1
        for row in _split(rows, dimension, means, change)
    ]
    splits += _parts(before, after, change)
    return Drop(
        run_id=run_id,
        steps=steps,
        against=against,
        num_rows=(before.height, after.height),
        reward_mean=(means[0], means[1]),
        change=change,
        low=change - Z * error,
        high=change + Z * error,
        p=p,
        splits=splits,
        findings=_findings(splits, change, means) if p < ALPHA else [],
    )


def _rows(
    store: Store, run_id: str, steps: tuple[int, int], against: tuple[int, int]
) -> pl.DataFrame:
    ranges = [f"step BETWEEN {first} AND {last}" for first, last in (steps, against)]
    found = store.sql(
        f"""
        SELECT step BETWEEN {steps[0]} AND {steps[1]} AS is_after, group_id, task_id, taskset,
               source, engine, finish_reason, policy_version, lag, length, reward, rewards
        FROM trained_rows WHERE run_id = {literal(run_id)} AND ({ranges[0]} OR {ranges[1]})
        """
    ).pl()
    if max(steps[0], against[0]) <= min(steps[1], against[1]):
        raise QueryError(
            f"steps {steps[0]}:{steps[1]} and {against[0]}:{against[1]} overlap; give two ranges "
            "that share no step"
        )
    found = found.filter(pl.col("reward").is_finite())
    text = ("task_id", "policy_version")
    names = ("taskset", "source", "engine", "finish_reason", "lag")
    return found.with_columns(
        *(pl.col(c).cast(pl.String).fill_null(NONE) for c in text),
        *(named(c) for c in names),
        length=quintiles(found["length"]),
    )


def _nothing(store: Store, run_id: str, first: int, last: int) -> JobError:
    ends = store.sql(
        f"SELECT min(step), max(step) FROM draws_current WHERE run_id = {literal(run_id)}"
    ).fetchall()[0]
    return JobError(
        f"steps {first}:{last} of run `{run_id}` have no row with a reward; its steps are "
        f"{ends[0]}:{ends[1]}"
    )


def _split(
    rows: pl.DataFrame, dimension: str, means: list[float], change: float
) -> list[dict[str, Any]]:
    """Split the change over the bins of a column; those that explain least become one."""
    middle = sum(means) / 2
    own = pl.col("reward") - middle
    cells = rows.group_by(dimension, "is_after", "group_id").agg(
        n=pl.len(), y=pl.col("reward").sum(), s=own.sum()
    )
    whole = rows.group_by("is_after", "group_id").agg(a=own.sum())
    sizes = rows.group_by("is_after").agg(size=pl.len(), clusters=pl.col("group_id").n_unique())
    totals = whole.group_by("is_after").agg(a2=(pl.col("a") ** 2).sum(), a=pl.col("a").sum())
    s, a = pl.col("s"), pl.col("a")
    sums = cells.join(whole, on=["is_after", "group_id"]).group_by(dimension, "is_after")
    bins = sums.agg(
        n=pl.col("n").sum(), y=pl.col("y").sum(), s=s.sum(), s2=(s**2).sum(), sa=(s * a).sum()
    )
    # both sides of each bin, so that one that is only on one side varies on the other too
    ends = bins.select(dimension).unique().join(sizes.join(totals, on="is_after"), how="cross")
    bins = ends.join(bins, on=[dimension, "is_after"], how="left").with_columns(
        pl.col("n", "s", "s2", "sa").fill_null(0), w=pl.col("n").fill_null(0) / pl.col("size")
    )
    average = pl.col("w").mean().over(dimension)
    few = pl.max_horizontal(pl.col("clusters") - 1, pl.lit(1))
    squares = pl.col("s2") - 2 * average * pl.col("sa") + average**2 * pl.col("a2")
    total = pl.col("s") - average * a
    made = bins.select(
        dimension,
        "is_after",
        "w",
        m=pl.col("y") / pl.col("n"),
        t=pl.col("s") / pl.col("size"),
        variance=(squares - total**2 / pl.col("clusters"))
        * (pl.col("clusters") / few / pl.col("size") ** 2),
    )
    one, two = (made.filter(pl.col("is_after") == side).drop("is_after") for side in (False, True))
    both = one.join(two, on=dimension, suffix="2")
    # a bin that is absent from one range has no change of its own: all of it is mix
    m, m2 = pl.coalesce("m", "m2"), pl.coalesce("m2", "m")
    w = (pl.col("w") + pl.col("w2")) / 2
    both = both.select(
        bin=pl.col(dimension),
        rows_before=pl.col("w"),
        rows_after=pl.col("w2"),
        mean_before=pl.col("m"),
        mean_after=pl.col("m2"),
        change=pl.col("t2") - pl.col("t"),
        within=w * (m2 - m),
        mix=(pl.col("w2") - pl.col("w")) * ((m + m2) / 2 - middle),
        excess=pl.col("t2") - pl.col("t") - w * change,
        error=(pl.col("variance") + pl.col("variance2")).clip(0).sqrt(),
    )
    number = both.height
    both = both.sort(pl.col("change").abs(), "bin", descending=[True, False])
    return [
        _row(dimension, row, change, number)
        for row in [*both.head(SHOWN).to_dicts(), *_rest(both[SHOWN:])]
    ]


def _rest(bins: pl.DataFrame) -> list[dict[str, Any]]:
    """Return what the bins that are not shown explain together, so that shares add up to 1."""
    if not bins.height:
        return []
    added = ("rows_before", "rows_after", "change", "within", "mix", "excess")
    none = {"mean_before": None, "mean_after": None, "error": None}
    sums = bins.select(added).sum().row(0, named=True)
    return [{"bin": f"({bins.height} others)", **sums, **none}]


def _row(dimension: str, row: dict[str, Any], change: float, number: int) -> dict[str, Any]:
    error, excess = row.pop("error"), row.pop("excess")
    p = None if error is None else min(1.0, number * _p_of(excess, error))
    of = [part / change if change else None for part in (row["change"], excess)]
    return {"dimension": dimension, **row, "share": of[0], "excess": of[1], "p": p}


def _parts(before: pl.DataFrame, after: pl.DataFrame, change: float) -> list[dict[str, Any]]:
    """Split the change over the parts of the reward, and what they leave."""
    names = (
        pl.concat([before, after])["rewards"].explode().struct.field("name").drop_nulls().unique()
    )
    made: list[dict[str, Any]] = []
    for name in sorted(names):
        own = pl.element().filter(pl.element().struct.field("name") == name)
        value = pl.col("rewards").list.eval(own.struct.field("value")).list.sum().fill_null(0.0)
        part, error = two_means(before, after, value, cluster="group_id")
        means = [part_of.select(value.mean()).item() for part_of in (before, after)]
        made.append(_part(name, part, error, means))
    if made:
        rest = change - sum(row["change"] for row in made)
        if abs(rest) > 1e-9:
            made.append(_part("(no part)", rest, None, [None, None]))
    return [_row("part", row, change, len(made)) for row in made]


def _part(name: str, change: float, error: float | None, means: list[Any]) -> dict[str, Any]:
    none = {"rows_before": None, "rows_after": None, "mix": None}
    means_ = {"mean_before": means[0], "mean_after": means[1]}
    return {
        "bin": name,
        **none,
        **means_,
        "change": change,
        "within": change,
        "excess": change,
        "error": error,
    }


def _p_of(change: float, error: float) -> float:
    if error < 1e-12:
        return 0.0 if abs(change) > 1e-12 else 1.0
    return p_value(change / error)


def _findings(splits: list[dict[str, Any]], change: float, means: list[float]) -> list[str]:
    way = "fell" if change < 0 else "rose"
    found = [f"the mean reward {way} by {abs(change):.3f}, from {means[0]:.3f} to {means[1]:.3f}"]
    reported = [
        row
        for row in splits
        if row["p"] is not None and row["p"] < ALPHA and (row["excess"] or 0) >= LEAST_SHARE
    ]
    # of a version's rows all are in one of both ranges: it only repeats their mean
    reported = [row for row in reported if row["dimension"] != "policy_version"]
    reported.sort(key=lambda row: -row["excess"])
    found += [_sentence(row) for row in reported]
    if not [row for row in reported if row["dimension"] != "part"]:
        found.append("it is everywhere: no bin explains more of it than its share of the rows")
    return found


def _sentence(row: dict[str, Any]) -> str:
    text = f"{row['dimension']} {row['bin']} explains {share(row['share'])} of it"
    means = [row["mean_before"], row["mean_after"]]
    reported = "" if None in means else f"its mean went from {means[0]:.3f} to {means[1]:.3f}"
    if row["rows_before"] is None:
        return f"{text}: {reported}"
    rows = [share(row["rows_before"]), share(row["rows_after"])]
    sides = f"its share of the rows from {rows[0]} to {rows[1]}"
    parts = f"within {row['within']:+.3f}, mix {row['mix']:+.3f}"
    return f"{text}: {reported}{reported and ', '}{sides} ({parts})"
