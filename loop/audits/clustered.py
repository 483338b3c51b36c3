"""Tests and intervals of means over rows that depend on each other within a cluster."""

import math
from statistics import NormalDist

import numpy as np
import polars as pl

ALPHA = 1e-3
"""How often an audit reports anything of a run in which there is nothing, over all its tests."""
CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def p_value(z: float) -> float:
    """Return the two-sided p-value of a standard normal statistic.

    >>> round(p_value(1.96), 3)
    0.05
    """
    return math.erfc(abs(z) / math.sqrt(2))


def by_bin(rows: pl.DataFrame, column: str, value: str, *, cluster: str) -> pl.DataFrame:
    """Compare the mean of a value in each bin of a column with the mean in all other bins.

    Returns a row a bin: num_rows, mean, low and high (95 %), rest (the mean elsewhere), and the
    z of a score test. Its variance comes from the sums of whole clusters under the hypothesis that
    bins do not matter, so that z is at most the root of the number of clusters: few clusters never
    suffice, however many rows they have. The interval counts one more cluster of the average, so
    that a mean of exactly 0 or 1 has one too.
    """
    y = pl.col(value).cast(pl.Float64)
    total, least, most = rows.select(y.mean(), low=y.min(), high=y.max()).row(0)
    # sums of cells, so that no matrix of clusters by bins is made
    cells = rows.group_by(cluster, column).agg(n=pl.len(), y=y.sum())
    whole = cells.group_by(cluster).agg(a=(pl.col("y") - total * pl.col("n")).sum())
    cells = cells.join(whole, on=cluster).with_columns(own=pl.col("y") - total * pl.col("n"))
    squares = float(whole.select((pl.col("a") ** 2).sum()).item())
    clusters = whole.height
    bins = cells.group_by(column).agg(
        num_rows=pl.col("n").sum(),
        mean=pl.col("y").sum() / pl.col("n").sum(),
        total=pl.col("y").sum(),
        score=pl.col("own").sum(),
        own2=(pl.col("own") ** 2).sum(),
        cross=(pl.col("own") * pl.col("a")).sum(),
        count=pl.len(),
    )
    spread = (
        cells.join(bins.select(column, "mean"), on=column)
        .group_by(column)
        .agg(ss=((pl.col("y") - pl.col("mean") * pl.col("n")) ** 2).sum())
    )
    # Σ (own - p a)² over all clusters: in those without the bin, own is 0
    p = pl.col("num_rows") / rows.height
    variance = pl.col("own2") - 2 * p * pl.col("cross") + p**2 * squares
    size = pl.col("num_rows") / pl.col("count")
    one_more = ((total - pl.col("mean")) * size) ** 2
    few = pl.max_horizontal(pl.col("count") - 1, pl.lit(1))
    error = (((pl.col("ss") + one_more) * pl.col("count") / few).sqrt() / pl.col("num_rows")) * Z
    everything = float(rows.select(y.sum()).item())
    correction = math.sqrt(max(clusters - 1, 1) / clusters)
    return (
        bins.join(spread, on=column)
        .with_columns(
            low=pl.max_horizontal(pl.col("mean") - error, pl.lit(least)),
            high=pl.min_horizontal(pl.col("mean") + error, pl.lit(most)),
            rest=(everything - pl.col("total"))
            / pl.when(pl.col("num_rows") < rows.height).then(rows.height - pl.col("num_rows")),
            z=pl.when(variance > 1e-12)
            .then(correction * pl.col("score") / variance.sqrt())
            .otherwise(0.0),
        )
        .select(column, "num_rows", "mean", "low", "high", "rest", "z")
        .sort(pl.col(column).str.extract(r"^(\d+)", 1).cast(pl.Int64), column)
    )


def two_means(
    first: pl.DataFrame, second: pl.DataFrame, value: pl.Expr, *, cluster: str
) -> tuple[float, float]:
    """Return the mean of a value in the second rows less that in the first, and its error."""
    found = []
    for rows in (first, second):
        values = rows.select(pl.col(cluster), v=value)
        mean = float(values["v"].mean())  # type: ignore[arg-type]
        sums = values.group_by(cluster).agg(s=(pl.col("v") - mean).sum())["s"].to_numpy()
        count = len(sums)
        found.append((mean, float((sums**2).sum()) * count / max(count - 1, 1) / rows.height**2))
    (a, var_a), (b, var_b) = found
    return b - a, float(np.sqrt(var_a + var_b))
