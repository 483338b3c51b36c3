"""Figures of time: what a snapshot and a branch of a large store cost."""

from collections.abc import Callable, Iterator
from pathlib import Path

from .figure import Bench, Figure, of, timed

_TIMES = 5
_MB = 1e6


def snapshots(bench: Bench) -> Iterator[Figure]:
    """Name the whole store."""
    yield from _cost(bench, "snapshot", lambda i: bench.large.snapshot(f"bench-{i}"))


def branches(bench: Bench) -> Iterator[Figure]:
    """Let the whole store go two ways."""
    yield from _cost(bench, "branch", lambda i: bench.large.branch(f"bench-{i}"))


def _cost(bench: Bench, name: str, work: Callable[[int], object]) -> Iterator[Figure]:
    """Measure the time of each, and by how much the store grows with one."""
    folder = bench.large.folder
    assert folder is not None
    before = _bytes(folder)
    workload = f"one {name} of a store of {bench.rows} rows, {before / _MB:.0f} MB"
    yield of(timed(work, times=_TIMES, warm_up=1), name, 1000.0, workload)
    grown = (_bytes(folder) - before) / (_TIMES + 1) / _MB
    yield Figure(f"{name}_bytes", round(grown, 4), "MB", 1.0, workload)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
