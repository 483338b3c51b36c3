"""Figures of appends: alone, shared by many small ones, from many processes, and until seen."""

import json
import sys
from collections.abc import Iterator
from time import monotonic, perf_counter

import numpy as np
from support.processes import said, start, tell

from rlake.store import Experience, Store, Task, connect

from .figure import Bench, Figure, of, rows, timed

WRITERS = 8
SECONDS = 20.0
ROWS = 32
"""Rows of one append of `write_for`."""
CALLED = "import sys; from bench.writing import *; place, a, *b = sys.argv[1:]; "
WRITER = CALLED + "write_for(place, int(a), float(b[0]))"
WAITER = CALLED + "wait_each(place, int(a))"
"""What other processes do."""


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


def group_commit(bench: Bench) -> Iterator[Figure]:
    """Submit single rows, each committed for itself and many together."""
    store = connect(bench.folder / "group_commit")
    for n, together in ((300, False), (3000, True)):
        name = "submissions_together" if together else "submissions_alone"
        began = perf_counter()
        (_submit if together else _append)(store, name, n)
        rate = n / (perf_counter() - began)
        how = "through a committer" if together else "appended one by one"
        yield Figure(name, round(rate, 1), "rows/s", None, f"{n} tasks of one row, {how}")


def many_writers(bench: Bench) -> Iterator[Figure]:
    """Append from many processes to one table."""
    folder = bench.folder / "many_writers"
    connect(folder)
    writers = [start(WRITER, folder, me, SECONDS) for me in range(WRITERS)]
    for writer in writers:
        said(writer)
    for writer in writers:
        tell(writer)
    taken = [t for w in writers for t in json.loads(w.communicate()[0])]
    what = f"{ROWS} rows an append, {WRITERS} processes for {SECONDS:g} s, {len(taken)} appends"
    for percent, budget in ((50, None), (99, 1000.0)):
        value = round(1000 * float(np.percentile(taken, percent)), 1)
        yield Figure(f"append_{WRITERS}_writers_p{percent}", value, "ms", budget, what)


def seen(bench: Bench) -> Iterator[Figure]:
    """Append in one process, and wait for it in another."""
    store = connect(bench.folder / "seen")
    waiter = start(WAITER, bench.folder / "seen", 200)
    said(waiter)
    late = []
    for n in range(1, 201):
        store.append("tasks", [Task.ask(str(n))])
        stored = monotonic()  # one clock for all processes of a machine
        late.append(1000 * (float(said(waiter)) - stored))
    waiter.communicate()
    what = "from the return of an append until `wait_for` returns in another process, 200 times"
    for percent in (50, 99):
        value = round(float(np.percentile(late, percent)), 1)
        yield Figure(f"seen_p{percent}", value, "ms", 50.0, what)


def write_for(uri: str, me: int, seconds: float) -> None:
    """Append for some time once a line is read, and print the seconds that each append took."""
    store = connect(uri)
    print("ready", flush=True)
    sys.stdin.readline()
    taken = []
    ends = monotonic() + seconds
    while monotonic() < ends:
        made = [_experience(me, len(taken) + 1, place) for place in range(ROWS)]
        began = perf_counter()
        store.append("experiences", made)
        taken.append(perf_counter() - began)
    print(json.dumps(taken), flush=True)


def wait_each(uri: str, rows: int) -> None:
    """Wait for one row after another, and print when each was seen."""
    store = connect(uri)
    print("ready", flush=True)
    for n in range(1, rows + 1):
        store.wait_for(
            lambda n=n: True if store.count("tasks") >= n else None,
            tables=["tasks"],
            seconds=60.0,
            describe=lambda n=n: f"need {n} tasks, have {store.count('tasks')}",
        )
        print(monotonic(), flush=True)


def _experience(me: int, step: int, place: int) -> Experience:
    return Experience(
        experience_id=f"{me}/{step:06d}/{place:02d}",
        group_id=f"{me}/{step:06d}",
        task_id="bench",
        run_id=str(me),
        batch=step,
        rollout_index=place,
        token_ids=list(range(64)),
        logprobs=[-0.5] * 64,
        reward=1.0,
    )


def _append(store: Store, name: str, n: int) -> None:
    for i in range(n):
        store.append("tasks", [Task.ask(f"{name} {i}")])


def _submit(store: Store, name: str, n: int) -> None:
    with store.committer() as committer:
        for i in range(n):
            committer.submit("tasks", [Task.ask(f"{name} {i}")])
