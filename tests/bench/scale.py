"""How costs grow with the rows of a store."""

import shutil
from collections.abc import Iterator
from functools import partial
from statistics import median

import numpy as np

from rlake.store import Store, connect
from rlake.store.doctor import diagnose
from rlake.store.replay import Freshness, Prioritized, Sampler

from .draws import fresh, stale
from .figure import PAYLOAD, Bench, Figure, of, once, rows, say, timed, told

SIZES = (10_000, 100_000, 1_000_000)
FRESH = 8_192
"""Newest rows of each store, of 256-512 tokens; the others are stale and have 4."""
N, AT_ONCE, TIMES = 256, 65_536, 20
_OPEN = """
import sys, time
import rlake
from rlake.store import connect
began = time.perf_counter()
store = connect(sys.argv[1])
rows = store.count("experiences")
seconds = time.perf_counter() - began
from pathlib import Path
lines = Path("/proc/self/status").read_text().splitlines()
held = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
print([seconds, held, rows])
"""


def scale(bench: Bench) -> Iterator[Figure]:
    """Measure the same work on stores of different sizes, up to `--rows` if that is more."""
    for size in sorted({*SIZES, max(bench.rows, SIZES[-1])}):
        folder = bench.folder / f"scale-{size}"
        store = connect(folder)
        _, seconds = once(partial(_fill, store, size))
        _, care = once(store.maintain)
        say(f"store of {size} rows, made in {seconds:.0f} s, maintained in {care:.1f} s")
        yield from _measured(store, size, str(folder))
        shutil.rmtree(folder)


def _fill(store: Store, size: int) -> None:
    """Append rows, and the draws of steps that used the newest."""
    for start in range(0, size - FRESH, AT_ONCE):
        n = min(AT_ONCE, size - FRESH - start)
        store.append("experiences", stale(n, first=start))
    made = fresh(np.random.default_rng(0), FRESH, first=size - FRESH)
    store.append("experiences", made)
    ids = made.column("experience_id").to_pylist()
    for step in range(1, FRESH // N + 1):
        drawn = ids[(step - 1) * N : step * N]
        store.append("draws", [_draw(step, place, id_) for place, id_ in enumerate(drawn)])


def _draw(step: int, place: int, experience_id: str) -> dict[str, object]:
    return {
        "run_id": "bench",
        "attempt": 1,
        "step": step,
        "position": place,
        "epoch": 1,
        "experience_id": experience_id,
        "weight": 1.0,
        "lag": 0,
        "sampler": "{}",
        "digest": "0",
    }


def _measured(store: Store, size: int, folder: str) -> Iterator[Figure]:
    what = f"of {size} experiences"
    opened = [told((_OPEN, folder), "opening a store") for _ in range(5)]
    assert all(found[2] == size for found in opened), "the store has all rows"
    yield of([1000 * s for s, _, _ in opened], f"scale_{size}_open", 100.0, f"a store {what}")
    memory = round(median(held for _, held, _ in opened) / 1024, 1)
    yield Figure(f"scale_{size}_open_memory", memory, "MB", None, f"process with a store {what}")
    yield from _draws(store, size, what)
    query = (
        "SELECT count(*), avg(e.reward) FROM draws d JOIN experiences e USING (experience_id) "
        "WHERE d.run_id = 'bench' AND d.step = 3"
    )
    [(found, _)] = store.sql(query).fetchall()
    assert found == N, f"a step has {N} rows, got {found}"
    taken = timed(lambda _: store.sql(query).fetchall(), times=TIMES)
    yield of(taken, f"scale_{size}_step_sql", None, f"reward of one step's {N} rows, {what}")
    query = f"SELECT count(*), avg(reward) FROM experiences WHERE batch = {size // N - 2}"
    taken = timed(lambda _: store.sql(query).fetchall(), times=TIMES)
    yield of(taken, f"scale_{size}_batch_sql", None, f"reward of one batch, {what}")
    query = "SELECT count(*), avg(reward_std) FROM groups"
    taken = timed(lambda _: store.sql(query).fetchall(), times=5, warm_up=1)
    yield of(taken, f"scale_{size}_groups", None, f"statistics of all groups {what}")
    rng = np.random.default_rng(1)
    batches = [rows(rng, N, first=size + N * i, versions=10, of=1 << 40) for i in range(TIMES + 3)]
    taken = timed(lambda i: store.append("experiences", batches[i]), times=TIMES)
    yield of(taken, f"scale_{size}_append", None, f"{N} rows of 256-512 tokens to a store {what}")
    for name, work in (("doctor", partial(diagnose, store)), ("maintain", store.maintain)):
        _, seconds = once(work)
        figure = f"scale_{size}_{name}"
        yield Figure(figure, round(1000 * seconds, 1), "ms", None, f"a store {what}, once")


def _draws(store: Store, size: int, what: str) -> Iterator[Figure]:
    strategy = Prioritized("1 + reward", alpha=0.6, beta=0.4)
    sampler = Sampler(store, strategy=strategy, freshness=Freshness(4), max_draws=None)
    _, seconds = once(lambda: sampler.supply(N, 9))
    first = round(1000 * seconds, 1)
    yield Figure(f"scale_{size}_index", first, "ms", None, f"the first look at a store {what}")

    def drawn(step: int) -> None:
        found = sampler.draw(N, step=step, policy_version=9)
        assert found is not None, "there are fresh rows"
        assert sampler.read(found, PAYLOAD).height == N

    taken = timed(drawn, times=TIMES)
    workload = f"{N} rows by priority with payload, {what}, {FRESH} of them fresh"
    yield of(taken, f"scale_{size}_draw", None, workload)
