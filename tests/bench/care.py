"""Figures of care and of finding."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from statistics import median

import numpy as np
import pyarrow as pa

from rlake.pipelines.embed import embed
from rlake.store import Store, connect, embeddings

from .figure import Bench, Figure, identity, of, once, say, timed

_COMMITS, _EDGE, _CHECKPOINT = 10_000, 500, 50
_LENGTH = 256
_WORDS = (
    "carry the one then add both digits so we get answer sum ten units tens digit column first "
    "second result therefore equals left right number half double twice minus plus"
)


def commits(bench: Bench) -> Iterator[Figure]:
    """Append 10,000 times with maintenance as often as the trainer does it."""
    store = connect(bench.folder / "commits")
    taken, cared = np.empty(_COMMITS), []
    for i in range(_COMMITS):
        taken[i] = 1000 * once(partial(store.append, "metrics", _metrics(i)))[1]
        if i % _CHECKPOINT == _CHECKPOINT - 1:
            cared.append(1000 * once(partial(store.maintain, only_due=True))[1])
        if i % 1000 == 999:
            say(f"{i + 1} commits, median of the last 500: {median(taken[i - 499 : i + 1]):.2f} ms")
    first, last = median(taken[:_EDGE]), median(taken[-_EDGE:])
    what = f"{_COMMITS} commits of 8 rows to one table, `maintain` after each {_CHECKPOINT}"
    ratio = round(last / first, 3)
    edges = f"last {_EDGE} {last:.2f} ms to first {first:.2f}"
    yield Figure("commits", ratio, "ratio", 1.5, f"{what}; {edges}")
    yield Figure("commits_p99", round(float(np.quantile(taken, 0.99)), 3), "ms", None, what)
    yield of(cared, "maintain_due", None, f"{what}; at most {max(cared):.0f} ms")
    reports, seconds = once(partial(store.maintain, grace=0))
    before = reports["metrics"].before
    all_ = f"all old versions: {before.versions} versions, {before.num_bytes / 1e6:.0f} MB before"
    yield Figure("maintain_all", round(seconds, 3), "s", None, f"{what}; then {all_}")


def care(bench: Bench) -> Iterator[Figure]:
    """Ask the same before and after maintenance of a store of many small files."""
    store = connect(bench.folder / "care")
    _fill(store, bench.rows, at_once=256)
    what = f"{bench.rows} experiences in commits of 256 rows without tokens"
    ids = iter(np.random.default_rng(2).integers(0, bench.rows, 1000))
    queries = {
        "where": lambda _: store.sql(
            "SELECT count(*), avg(reward) FROM experiences WHERE batch BETWEEN 100 AND 110"
        ).fetchall(),
        "look_up": lambda _: store.dataset("experiences").to_table(
            columns=["reward"], filter=f"experience_id = '{_name(next(ids))}'"
        ),
        "search": lambda _: store.search("carry the second digit"),
    }
    for name, query in queries.items():
        yield of(timed(query, times=7), f"{name}_before", None, what)
    _, seconds = once(store.maintain)
    yield Figure("maintain", round(seconds, 3), "s", None, f"{what}, first time")
    for name, query in queries.items():
        yield of(timed(query, times=15), name, None, f"{what}, after `maintain`")
    _fill(store, 1000, at_once=1000, first=bench.rows)
    yield of(
        timed(queries["search"], times=15), "search_new_rows", None, f"{what}, 1000 not indexed"
    )


def similar(bench: Bench) -> Iterator[Figure]:
    """Search by vectors: exactly, and by the index."""
    store, n = connect(bench.folder / "similar"), embeddings.WORTH_ROWS
    _fill(store, n, at_once=20_000)
    done, seconds = once(partial(embed, store))
    speed = round(done.rows / seconds)
    yield Figure("embed", speed, "rows/s", None, f"{n} responses of 30 words, hashed_ngrams")
    asked = [_name(i) for i in np.random.default_rng(3).integers(0, n, 40)]
    exact: dict[str, set[str]] = {}
    what = f"10 nearest of {n} x {_LENGTH}"

    def ask(place: int) -> set[str]:
        return set(store.similar(asked[place % len(asked)])["experience_id"])

    taken = timed(lambda i: exact.update({asked[i % 40]: ask(i)}), times=40, warm_up=1)
    yield of(taken, "similar_exact", None, what)
    _, built = once(store.maintain)
    yield of(
        timed(ask, times=40, warm_up=1), "similar", None, f"{what}, index made in {built:.1f} s"
    )
    found = {name: ask(i) for i, name in islice(enumerate(asked), 40)}
    recall = np.mean([len(found[name] & exact[name]) / len(exact[name]) for name in asked])
    yield Figure("similar_recall", round(float(recall), 4), "share", None, what)


def _metrics(step: int) -> pa.Table:
    names = [f"train/value_{i}" for i in range(8)]
    return pa.table(
        {
            "run_id": ["bench"] * 8,
            "attempt": [1] * 8,
            "job": ["train"] * 8,
            "step": [step] * 8,
            "name": names,
            "value": [0.5] * 8,
        }
    )


def _name(place: int) -> str:
    return f"bench/{place // 256:06d}/{place % 256 // 8:04d}/{place % 8:02d}"


def _fill(store: Store, n: int, *, at_once: int, first: int = 0) -> None:
    rng = np.random.default_rng(first)
    for start in range(first, first + n, at_once):
        places = range(start, min(start + at_once, first + n))
        store.append("experiences", _rows(rng, start, len(places)))
        if start // 50_000 != (start + at_once) // 50_000:
            say(f"{places[-1] + 1 - first} of {n} rows")


def _rows(rng: np.random.Generator, first: int, n: int) -> pa.Table:
    texts = [" ".join(words) for words in rng.choice(_WORDS.split(), (n, 30))]
    return pa.table({**identity(first, n), "reward": rng.random(n), "response_text": texts})
