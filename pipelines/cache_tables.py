"""Tables of cached results of operators: Lance datasets under `memory/` in the store's folder.

They hold no facts: deleting them costs only time.
"""

import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lance
import polars as pl

from ..store import Store
from ..store.changes import ChangeFeed
from ..store.errors import reason
from ..store.schema_versions import take

LIMIT_BYTES = 4 << 30
"""Most bytes of all caches of a store; the one that was written to longest ago is removed first."""

TIDY_EVERY = 64
"""Commits to a cache after which its small files are merged."""
_KEPT_FOR = timedelta(hours=1)
"""How long a reader may still use an old version."""

DIGEST = "digest_of_the_values"
"""The column by which results are looked up."""

_OPERATOR = "rlake.operator"
_ABSENT = ("not found", "does not exist", "No such file")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheEntry:
    """The cache of one operator with its parameters."""

    key: str
    operator: str
    rows: int
    num_bytes: int
    written_at: datetime


class CacheTables:
    """All caches of a store, by key. Threads may share it."""

    def __init__(self, store: Store, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._place, self._options = f"{store.root}/memory", store.storage_options
        self._is_local, self._limit = store.folder is not None, limit_bytes
        self._known: dict[str, _Known] = {}
        # one lock for all keys: to make room for one cache, others are removed
        self._free = threading.Lock()

    def find(self, key: str, digests: pl.Series, answer: pl.Schema) -> pl.DataFrame:
        """Return the cached results for some digests, each once, with the columns of `answer`."""
        with self._free, _tolerated(key):
            dataset = self._open(key)
            known = self._known.setdefault(key, _Known())
            known.follow(dataset)
            wanted = pl.DataFrame({DIGEST: digests.unique(maintain_order=True)})
            hits = wanted.join(known.rows, on=DIGEST, how="inner").sort("_rowid")
            first = hits.unique(DIGEST, keep="first", maintain_order=True)
            found = take(dataset, first["_rowid"].to_list(), answer.names())
            answers = pl.DataFrame(pl.from_arrow(found))
            return answers.select(pl.col(n).cast(kind) for n, kind in answer.items())
        return answer.to_frame()

    def add(self, key: str, operator: str, answers: pl.DataFrame) -> None:
        """Append results in one commit, unless they alone exceed the limit."""
        table = answers.to_arrow(compat_level=pl.CompatLevel.oldest())
        table = table.replace_schema_metadata({_OPERATOR: operator})
        with self._free, _tolerated(key):
            if not answers.height or not self._make_room(key, table.nbytes):
                return
            try:
                self._write(key, table, "append" if key in self._keys() else "create")
            except (OSError, ValueError, RuntimeError):
                self._write(key, table, "append")  # another process created it in the meantime

    def count(self, key: str) -> int:
        """Return the number of results under a key."""
        with _tolerated(key):
            return self._open(key).count_rows()
        return 0

    def listed(self) -> list[CacheEntry]:
        """Return all caches, the one that was written to longest ago first."""
        found: list[CacheEntry] = []
        for key in self._keys():
            with _tolerated(key):
                found.append(_described(key, self._open(key)))
        return sorted(found, key=lambda m: (m.written_at, m.key))

    def clear(self, key: str | None = None) -> None:
        """Remove all caches, or the one of a key."""
        for one in self._keys() if key is None else [key]:
            self._known.pop(one, None)
            if self._is_local:
                shutil.rmtree(self._address(one), ignore_errors=True)
            else:
                self._database().drop_table(one, ignore_missing=True)

    def _write(self, key: str, rows: Any, mode: str) -> None:
        dataset = lance.write_dataset(
            rows,
            self._address(key),
            mode=mode,
            storage_options=self._options,
            # `_Known` keeps the addresses of rows, also over compactions
            enable_stable_row_ids=True,
        )
        if dataset.version % TIDY_EVERY == 0:
            dataset.optimize.compact_files()
            dataset.cleanup_old_versions(_KEPT_FOR)

    def _make_room(self, key: str, num_bytes: int) -> bool:
        """Remove old caches until `num_bytes` more fit; return whether they do."""
        there = self.listed()
        size = sum(m.num_bytes for m in there) + num_bytes
        for old in there:
            if size > self._limit and old.key != key:
                _log.info("removed %d cached results of `%s`", old.rows, old.operator)
                self.clear(old.key)
                size -= old.num_bytes
        return size <= self._limit

    def _address(self, key: str) -> str:
        return f"{self._place}/{key}.lance"

    def _open(self, key: str) -> lance.LanceDataset:
        return lance.dataset(self._address(key), storage_options=self._options)

    def _keys(self) -> list[str]:
        if self._is_local:
            return sorted(place.stem for place in Path(self._place).glob("*.lance"))
        return sorted(self._database().list_tables(limit=10_000).tables)

    def _database(self) -> Any:
        import lancedb  # takes most of a second, and only an address needs it

        return lancedb.connect(self._place, storage_options=self._options)


@dataclass
class _Known:
    """The digests of a cache with the addresses of their rows, read incrementally."""

    tail: ChangeFeed = field(default_factory=lambda: ChangeFeed([DIGEST]))
    rows: pl.DataFrame = field(
        default_factory=lambda: pl.DataFrame(schema={DIGEST: pl.String, "_rowid": pl.UInt64})
    )

    def follow(self, dataset: lance.LanceDataset) -> None:
        if not self.tail.moved(dataset):
            return
        new = pl.DataFrame(pl.from_arrow(self.tail.read(dataset)))
        self.rows = new if self.tail.restarted else pl.concat([self.rows, new])


def _described(key: str, dataset: lance.LanceDataset) -> CacheEntry:
    newest: Any = dataset.versions()[-1]
    return CacheEntry(
        key,
        (dataset.schema.metadata or {}).get(_OPERATOR.encode(), b"?").decode(),
        dataset.count_rows(),
        int(newest["metadata"]["total_files_size"]),
        newest["timestamp"].astimezone(UTC),
    )


@contextmanager
def _tolerated(key: str) -> Iterator[None]:
    """Continue without a cache that is missing, was deleted, or cannot be read or written.

    Its results are computed again.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if not any(word in str(error) for word in _ABSENT):
            _log.warning("the cache `%s` is skipped: %s", key, reason(error))
