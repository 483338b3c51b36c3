"""Partitions: rows split so that each part has a bounded size, with whole groups if needed."""

from itertools import pairwise

import numpy as np
import polars as pl

MOST_ROWS = 131_072
"""Most rows of a part, also of small rows: what an operator holds in memory at once."""


def cut(sizes: np.ndarray, *, part_bytes: int, groups: pl.Series | None = None) -> list[np.ndarray]:
    """Return the indices of the rows of each part, ascending within a part.

    A part holds at most `part_bytes` of the rows' `sizes` and at most MOST_ROWS rows, but at least
    one row or group. Groups are in the order of their first rows; NULL is a group too.

    >>> [p.tolist() for p in cut(np.full(4, 1.0), part_bytes=2)]
    [[0, 1], [2, 3]]
    >>> [p.tolist() for p in cut(np.full(4, 1.0), part_bytes=2, groups=pl.Series(list("abab")))]
    [[0, 2], [1, 3]]
    """
    if not len(sizes):
        return []
    unit = np.arange(len(sizes))
    if groups is not None:
        rows = groups.to_frame("group").with_row_index("place")
        first = rows.select(pl.col("place").first().over("group"))
        unit = np.unique(first.to_series().to_numpy(), return_inverse=True)[1]
    # one weight for both limits: a unit fills a share of the bytes, or of the rows
    weight = np.maximum(sizes / part_bytes, 1.0 / MOST_ROWS)
    part = _packed(np.bincount(unit, weights=weight))[unit]
    order = np.argsort(part, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(part[order])) + 1)


def _packed(weights: np.ndarray) -> np.ndarray:
    """Return the part of each unit: consecutive units up to a total weight of 1."""
    ends = np.cumsum(weights)
    part = np.empty(len(weights), np.int64)
    start, number = 0, 0
    while start < len(weights):
        before = ends[start] - weights[start]
        # 1e-9: sums of shares are rounded, and a full part must not lose its last row
        end = max(start + 1, int(np.searchsorted(ends, before + 1.0 + 1e-9, side="right")))
        part[start:end] = number
        start, number = end, number + 1
    return part


def in_order(parts: list[np.ndarray]) -> bool:
    """Return whether the rows of consecutive parts are in ascending order.

    >>> in_order([np.array([0, 1]), np.array([2])]), in_order([np.array([0, 2]), np.array([1])])
    (True, False)
    """
    return all(a[-1] < b[0] for a, b in pairwise(parts))
