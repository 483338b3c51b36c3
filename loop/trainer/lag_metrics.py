"""A histogram of the lag of a step's rows, in training steps."""

from collections.abc import Mapping

import polars as pl

BUCKETS: Mapping[str, tuple[int, float]] = {
    "0": (0, 0),
    "1": (1, 1),
    "2": (2, 2),
    "3": (3, 3),
    "4_7": (4, 7),
    "8_15": (8, 15),
    "16_up": (16, float("inf")),
}
"""The first and the last lag of each bucket, by name."""


def lags(lag: pl.Series) -> dict[str, float]:
    """Return the metrics of a step's lags; null is an unknown lag.

    `train/lag_0`, `train/lag_1`, `train/lag_2`, `train/lag_3`, `train/lag_4_7`, `train/lag_8_15`
    and `train/lag_16_up` count the rows with these lags, `train/lag_unknown` those of other runs;
    `train/lag_mean` and `train/lag_max` are over the known ones.

    >>> found = lags(pl.Series([0, 0, 6, None]))
    >>> [found[f"train/lag_{name}"] for name in ("0", "1", "4_7", "unknown", "mean", "max")]
    [2.0, 0.0, 1.0, 1.0, 2.0, 6.0]
    """
    found = {
        f"train/lag_{name}": float(lag.is_between(first, last).sum())
        for name, (first, last) in BUCKETS.items()
    }
    found["train/lag_unknown"] = float(lag.null_count())
    known = lag.drop_nulls()
    if len(known):
        found |= {
            "train/lag_mean": float(known.mean()),  # type: ignore[arg-type]
            "train/lag_max": float(known.max()),  # type: ignore[arg-type]
        }
    return found
