"""Statistics and seeded random numbers that do not depend on the order of rows, to the last bit."""

import hashlib
from typing import Any, Literal

import numpy as np
import polars as pl

GROUP = "group_id"


def finite(column: str) -> pl.Expr:
    """Return a column of numbers; NULL where one is NaN or infinite, as where it was not computed.

    Polars orders NaN above all numbers, so that it would count as a pass.
    """
    value = pl.col(column).cast(pl.Float64)
    return pl.when(value.is_finite()).then(value)


reward = finite("reward")


def advantage(value: pl.Expr) -> pl.Expr:
    """Name a value, which is given to rows that have a reward."""
    return pl.when(reward.is_not_null()).then(value).alias("advantage")


def mean(value: pl.Expr, *over: str) -> pl.Expr:
    """Return the mean of the values that are not NULL, of all rows or of groups."""
    return _of_groups(value, over, "mean") if over else listed(value).mean()


def centered(value: pl.Expr, *over: str) -> pl.Expr:
    """Return values less their mean; 0 where they do not differ."""
    if over:
        return _of_groups(value, over, "centered")
    return pl.when(differ(value)).then(value - mean(value)).otherwise(zero(value))


def std(value: pl.Expr, *over: str) -> pl.Expr:
    """Return the standard deviation (divisor n - 1) in groups; exactly 0 where values are equal."""
    return _of_groups(value, over, "std")


def zscore(value: pl.Expr, *over: str, epsilon: float) -> pl.Expr:
    """Return values less their mean, in standard deviations; 0 where they do not differ."""
    if over:
        return _of_groups(value, over, "zscore", epsilon)
    scaled = (value - mean(value)) * inverse(listed(value).std(ddof=1) + epsilon)
    return pl.when(differ(value)).then(scaled).otherwise(zero(value))


def differ(value: pl.Expr, *over: str) -> pl.Expr:
    """Whether values are not all equal; exact, where a deviation leaves rounding errors."""
    top, low = value.max(), value.min()
    return top.over(over) > low.over(over) if over else top > low


def listed(value: pl.Expr) -> Any:
    """Return the list functions of all values that are not NULL, sorted.

    Polars adds floats up in another order each time, but never those of a list.
    """
    return value.implode().list.drop_nulls().list.sort().list


def inverse(value: pl.Expr) -> pl.Expr:
    """Return what to multiply with, to divide.

    Polars' engines divide by one number in different ways, which differ in the last bit.
    """
    return 1.0 / value


def zero(value: pl.Expr) -> pl.Expr:
    """Return 0 where there is a value, else NULL."""
    return pl.when(value.is_not_null()).then(0.0)


_How = Literal["mean", "std", "centered", "zscore"]


def _of_groups(value: pl.Expr, over: tuple[str, ...], how: _How, epsilon: float = 0.0) -> pl.Expr:
    # lists and windows of Polars do the same, and take four times as long for small groups
    def work(given: pl.Series) -> pl.Series:
        rows = given.struct.unnest()
        values = rows["value"].to_numpy()
        made = _worked_out(values, _numbered(rows.drop("value")), how, epsilon)
        return pl.Series(made).fill_nan(None)

    both = pl.struct(value.cast(pl.Float64).alias("value"), *over)
    return both.map_batches(work, return_dtype=pl.Float64)


def _numbered(keys: pl.DataFrame) -> np.ndarray:
    """Number groups from 0, in the order of their keys."""
    number = np.zeros(keys.height, np.int64)
    for key in keys:
        own = key.rank("dense").fill_null(0).to_numpy().astype(np.int64)
        number = number * (own.max(initial=0) + 1) + own
        if keys.width > 1:
            number = np.unique(number, return_inverse=True)[1]
    return number


def _worked_out(values: np.ndarray, group: np.ndarray, how: _How, epsilon: float) -> np.ndarray:
    """Return a statistic of each row; NaN stands for NULL, and stays out of sums."""
    size = int(group.max(initial=-1)) + 1
    # sums of floats depend on the order of terms, and groups come in the order of the store: sorted
    # values give the same bits in each run
    in_order = np.lexsort((values, group))
    in_order = in_order[~np.isnan(values[in_order])]
    ordered, at = values[in_order], group[in_order]
    count = np.bincount(at, minlength=size)
    is_flat = _are_flat(ordered, count)
    with np.errstate(invalid="ignore", divide="ignore"):
        # bincount adds up one by one, in the order given
        means = np.bincount(at, ordered, minlength=size) / count
        if how == "mean":
            return means[group]
        message = values - means[group]
        if how != "centered":
            # of differences: mean(x^2) - mean(x)^2 has no digits left where values hardly differ
            squares = np.bincount(at, (ordered - means[at]) ** 2, minlength=size)
            stds = np.sqrt(squares / (count - 1))
            stds[is_flat] = 0.0  # their mean may be wrong in its last bit
            stds[count < 2] = np.nan
            if how == "std":
                return stds[group]
            message = message / (stds + epsilon)[group]
    return np.where(is_flat[group] & ~np.isnan(values), 0.0, message)


def _are_flat(ordered: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Tell of each group whether its values, in order one group behind the other, are all equal."""
    last = np.cumsum(count) - 1
    is_flat = np.ones(len(count), bool)
    some = count > 0
    is_flat[some] = ordered[last[some]] == ordered[last[some] - count[some] + 1]
    return is_flat


def seeded_uniform(seed: int, *ids: str | int) -> float:
    """Return a pseudorandom number of [0, 1), the same for the same seed and ids.

    Unlike a generator's numbers, it does not depend on which other rows are there, or their order.

    >>> seeded_uniform(0, "a") == seeded_uniform(0, "a") != seeded_uniform(1, "a")
    True
    """
    text = "\x1f".join(map(str, (seed, *ids)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    # the 53 bits that a float's mantissa holds
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53
