"""Memories: answers of costly operators, in Lance datasets under `memory/` in the store's folder.

They hold no fact: whoever deletes some of them loses only time.
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
from ..store.change_feed import ChangeFeed
from ..store.errors import reason
from ..store.take_rows import take

LIMIT_BYTES = 4 << 30
"""Most bytes of a store's memories together; those that were added to longest ago go first."""

TIDY_EVERY = 64
"""Commits to a memory after which its small files are merged."""
_KEPT_FOR = timedelta(hours=1)
"""How long a version may be in the hands of a reader."""

DIGEST = "digest_of_the_values"
"""The column by which answers are found."""

_OPERATOR = "rlake.operator"
_ABSENT = ("not found", "does not exist", "No such file")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remembered:
    """What is remembered of one operator with its parameters."""

    key: str
    operator: str
    rows: int
    num_bytes: int
    written_at: datetime


class CacheTables:
    """All memories of a store, by key. Threads may share it."""

    def __init__(self, store: Store, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._place, self._options = f"{store.root}/memory", store.storage_options
        self._is_local, self._limit = store.folder is not None, limit_bytes
        self._known: dict[str, _Known] = {}
        self._free = threading.Lock()

    def find(self, key: str, digests: pl.Series, answer: pl.Schema) -> pl.DataFrame:
        """Return the answers, of these columns, that stand under some of the digests, each once."""
        with self._free, _forgiven(key):
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
        """Append answers in one commit, unless they are too many even without other memories."""
        table = answers.to_arrow(compat_level=pl.CompatLevel.oldest())
        table = table.replace_schema_metadata({_OPERATOR: operator})
        with self._free, _forgiven(key):
            if not answers.height or not self._make_room(key, table.nbytes):
                return
            try:
                self._write(key, table, "append" if self._exists(key) else "create")
            except (OSError, ValueError, RuntimeError):
                self._write(key, table, "append")  # another made it meanwhile

    def count(self, key: str) -> int:
        """Return how many answers stand under a key."""
        with _forgiven(key):
            return self._open(key).count_rows()
        return 0

    def listed(self) -> list[Remembered]:
        """Return what is remembered, that which was added to longest ago first."""
        found: list[Remembered] = []
        for key in self._keys():
            with _forgiven(key):
                found.append(_described(key, self._open(key)))
        return sorted(found, key=lambda m: (m.written_at, m.key))

    def clear(self, key: str | None = None) -> None:
        """Forget everything, or what stands under one key."""
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
            enable_stable_row_ids=True,
        )
        if dataset.version % TIDY_EVERY == 0:
            dataset.optimize.compact_files()
            dataset.cleanup_old_versions(_KEPT_FOR)

    def _make_room(self, key: str, num_bytes: int) -> bool:
        """Forget what was added to longest ago, until these bytes fit; tell whether they do."""
        there = self.listed()
        size = sum(m.num_bytes for m in there) + num_bytes
        for old in there:
            if size > self._limit and old.key != key:
                _log.info("forgot %d answers of `%s`", old.rows, old.operator)
                self.clear(old.key)
                size -= old.num_bytes
        return size <= self._limit

    def _address(self, key: str) -> str:
        return f"{self._place}/{key}.lance"

    def _open(self, key: str) -> lance.LanceDataset:
        return lance.dataset(self._address(key), storage_options=self._options)

    def _exists(self, key: str) -> bool:
        return key in self._keys()

    def _keys(self) -> list[str]:
        if self._is_local:
            return sorted(place.stem for place in Path(self._place).glob("*.lance"))
        return sorted(self._database().list_tables(limit=10_000).tables)

    def _database(self) -> Any:
        import lancedb  # takes most of a second, and only an address needs it

        return lancedb.connect(self._place, storage_options=self._options)


@dataclass
class _Known:
    """The digests of a memory with the addresses of their rows; only new ones are read."""

    tail: ChangeFeed = field(default_factory=lambda: ChangeFeed([DIGEST]))
    rows: pl.DataFrame = field(
        default_factory=lambda: pl.DataFrame(schema={DIGEST: pl.String, "_rowid": pl.UInt64})
    )

    def follow(self, dataset: lance.LanceDataset) -> None:
        if not self.tail.moved(dataset):
            return
        new = pl.DataFrame(pl.from_arrow(self.tail.read(dataset)))
        self.rows = new if self.tail.restarted else pl.concat([self.rows, new])


def _described(key: str, dataset: lance.LanceDataset) -> Remembered:
    newest: Any = dataset.versions()[-1]
    return Remembered(
        key,
        (dataset.schema.metadata or {}).get(_OPERATOR.encode(), b"?").decode(),
        dataset.count_rows(),
        int(newest["metadata"]["total_files_size"]),
        newest["timestamp"].astimezone(UTC),
    )


@contextmanager
def _forgiven(key: str) -> Iterator[None]:
    """Go on without a memory that is absent, was deleted meanwhile, or cannot be read or written.

    Then what it held is worked out again.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if not any(word in str(error) for word in _ABSENT):
            _log.warning("the memory `%s` is left aside: %s", key, reason(error))
