"""Figures of appends."""

from collections.abc import Iterator

import numpy as np

from ...store import Experience, connect
from .figure import Bench, Figure, of, rows, timed


def append(bench: Bench) -> Iterator[Figure]:
    """Append batches of 256, as Arrow rows and as the records that the explorer appends."""
    what = "256 experiences of 256-512 tokens, into one store"
    rng = np.random.default_rng(1)
    batches = [rows(rng, 256, first=256 * i, versions=10, of=256 * 80) for i in range(80)]
    records = [[Experience.from_row(r) for r in b.to_pylist()] for b in batches[40:]]
    store = connect(bench.folder / "append")
    taken = timed(lambda i: store.append("experiences", batches[i]), times=37)
    yield of(taken, "append", 10.0, f"{what}, as an Arrow table")
    taken = timed(lambda i: store.append("experiences", records[i]), times=37)
    yield of(taken, "append_records", None, f"{what}, as Python records")
