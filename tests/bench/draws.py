"""Figures of draws: looking, choosing rows and reading their payload."""

from collections.abc import Iterator
from functools import partial
from statistics import median

import numpy as np
import pyarrow as pa

from rlake.store import Store, connect
from rlake.store.replay import Freshness, Prioritized, Sampler

from .figure import PAYLOAD, Bench, Figure, identity, of, once, rows, say, timed, tokens

_VERSIONS = 10
_N = 256
_LARGE = 2_000_000
_ROWS_AT_ONCE = 65_536


def draw(bench: Bench) -> Iterator[Figure]:
    """Draw 256 rows, fresh and prioritized: look what is there, choose, and read the payload."""
    size = f"{_N} fresh of {bench.rows} rows of 256-512 tokens"
    sampler = _sampler(bench.large, Prioritized("1 + reward", alpha=0.6, beta=0.4))
    yield _first(sampler, "index", bench.rows)
    taken = timed(lambda step: _draw(sampler, step), times=40, warm_up=5)
    yield of(taken, "draw", 25.0, f"{size}, prioritized, payload read")
    choose = timed(lambda i: sampler.draw(_N, step=i, policy_version=9), times=40)
    yield of(choose, "draw_choose", None, f"{size}, prioritized, without the payload")
    dynamic = _sampler(bench.large, Prioritized("(1 + reward) * pow(0.9, age)"))
    dynamic.supply(_N, 9)
    taken = timed(lambda step: _draw(dynamic, step), times=20)
    yield of(taken, "draw_dynamic", None, f"{size}, priority with `age`, payload read")


def draw_2m(bench: Bench) -> Iterator[Figure]:
    """Draw the same from ten times as many rows, and from a store with only a tenth of them."""
    small, large = _sampler(_store(bench, _LARGE // 10)), _sampler(_store(bench, _LARGE))
    what = (
        f"{_N} fresh rows of 256-512 tokens, prioritized, payload read, of {{}} rows; the rest are "
        "stale and of 4 tokens"
    )
    yield _first(large, "index_2m", _LARGE)
    small.supply(_N, 9)
    taken: dict[int, list[float]] = {0: [], 1: []}
    for step in range(60):  # by turns, since the machine's speed changes
        for which, sampler in enumerate((small, large)):
            taken[which].append(1000 * once(partial(_draw, sampler, step))[1])
    few, many = taken[0][10:], taken[1][10:]
    yield of(few, "draw_200k", None, what.format(_LARGE // 10))
    yield of(many, "draw_2m", None, what.format(_LARGE))
    ratio = round(median(many) / median(few), 3)
    yield Figure("draw_2m_ratio", ratio, "x", 1.5, "draw_2m by draw_200k, medians of 50 by turns")
    held = large.nbytes / _LARGE
    yield Figure("index_bytes", round(held, 1), "bytes a row", 100.0, "of the index of 2 M rows")
    open_ = Sampler(_store(bench, _LARGE), strategy=Prioritized("1 + reward"), max_draws=None)
    open_.supply(_N, 9)
    choose = timed(lambda i: open_.draw(_N, step=i, policy_version=9), times=40)
    workload = f"{_N} of {_LARGE} rows, all fresh, prioritized, without the payload"
    yield of(choose, "draw_2m_choose", None, workload)


def _sampler(store: Store, strategy: Prioritized | None = None) -> Sampler:
    strategy = strategy or Prioritized("1 + reward", alpha=0.6, beta=0.4)
    return Sampler(store, strategy=strategy, freshness=Freshness(4), max_draws=None)


def _first(sampler: Sampler, figure: str, rows: int) -> Figure:
    _, taken = once(lambda: sampler.supply(_N, 9))
    what = f"the first look at {rows} rows; later ones read what is new"
    return Figure(figure, round(1000 * taken, 3), "ms", None, what)


def _draw(sampler: Sampler, step: int) -> None:
    drawn = sampler.draw(_N, step=step, policy_version=9)
    assert drawn is not None, "there are fresh rows"
    assert sampler.read(drawn, PAYLOAD).height == _N


def _store(bench: Bench, size: int) -> Store:
    """Return a store of `size` rows, of which the last 100,000 are fresh and have a payload."""
    folder = bench.folder / f"draws-{size}"
    if folder.exists():
        return connect(folder)
    store, num_fresh = connect(folder), 100_000
    for start in range(0, size - num_fresh, _ROWS_AT_ONCE):
        n = min(_ROWS_AT_ONCE, size - num_fresh - start)
        store.append("experiences", stale(n, first=start))
        say(f"store of {size} rows: {start + n}")
    rng = np.random.default_rng(0)
    for start in range(size - num_fresh, size, 8192):
        n = min(8192, size - start)
        store.append("experiences", fresh(rng, n, first=start))
    return store


def fresh(rng: np.random.Generator, n: int, *, first: int) -> pa.Table:
    made = rows(rng, n, first=first, versions=1, of=1 << 40)
    at = made.schema.get_field_index("policy_version")
    return made.set_column(at, "policy_version", pa.array(np.full(n, _VERSIONS - 1)))


def stale(n: int, *, first: int) -> pa.Table:
    """Make n rows as `rows` does, of four tokens each, and of versions that are stale."""
    place = np.arange(first, first + n)
    zeros = np.zeros(4 * n, np.float32)
    return pa.table(
        {
            **identity(first, n),
            "policy_version": place % 4,
            **tokens(np.full(n, 4), zeros, zeros, np.ones(4 * n, np.bool_)),
            "reward": (place % 5 == 0).astype(np.float64),
        }
    )
