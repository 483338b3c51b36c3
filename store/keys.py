"""Which ids a table holds: what makes an append idempotent."""

import lance
import numpy as np
import polars as pl
import pyarrow as pa

from .errors import ConflictError
from .ids import row_digests
from .schema import Table
from .tail import Tail

_IN_CHUNK = 500

Seen = dict[tuple[object, ...], str]
"""Keys with the digest of their row's content."""


class KeyIndex:
    """Hashes of all keys of one table, fed with the new fragments only."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._hashes: set[int] = set()
        self._tail = Tail(table.key)

    def refresh(self, dataset: lance.LanceDataset) -> None:
        """Read the keys of rows that came since the last call."""
        if self._tail.moved(dataset):
            self._hashes.update(self._hash(self._tail.read(dataset)))

    def committed(self, dataset: lance.LanceDataset, hashes: list[int]) -> None:
        """Note what this process appended: `hashes` is all that is new up to this version."""
        self._hashes.update(hashes)
        self._tail.skip(dataset)

    def fresh(
        self, rows: pa.Table, dataset: lance.LanceDataset, seen: Seen | None = None
    ) -> tuple[pa.Table, list[int]]:
        """Return the rows whose keys are new, and the hashes of their keys.

        A row that is stored already with the same content is left out; with other content it
        raises ConflictError. `created_at` is not content: a retry may come later. `seen` carries
        what earlier batches of the same append held.
        """
        hashes = self._hash(rows)
        twice = len(set(hashes)) < len(hashes)
        known = [h in self._hashes for h in hashes]
        if seen is None and not twice and not any(known):
            return rows, hashes
        stored: Seen = {} if seen is None else seen
        stored.update(self._stored(rows.filter(pa.array(known)), dataset))
        keep = []
        content = rows.drop_columns(["created_at"])
        for i, (key, digest) in enumerate(zip(self._keys(rows), row_digests(content), strict=True)):
            if key in stored and stored[key] != digest:
                raise ConflictError(
                    f"{self._named(key)} is in `{self._table.name}` already with other content; "
                    "stored rows do not change: give the new row an id of its own"
                )
            if key not in stored:
                stored[key] = digest
                keep.append(i)
        return rows.take(pa.array(keep, pa.int64())), [hashes[i] for i in keep]

    def _stored(self, rows: pa.Table, dataset: lance.LanceDataset) -> Seen:
        """Read the stored rows that may have the keys of `rows`, as key -> digest of content."""
        found: Seen = {}
        column = self._table.key[0]
        values = sorted({v for v in rows.column(column).to_pylist() if v is not None})
        for i in range(0, len(values), _IN_CHUNK):
            quoted = ", ".join(
                "'" + str(v).replace("'", "''") + "'" for v in values[i : i + _IN_CHUNK]
            )
            hits = dataset.to_table(filter=f"{column} IN ({quoted})")
            content = row_digests(hits.drop_columns(["created_at"]))
            found.update(zip(self._keys(hits), content, strict=True))
        return found

    def _keys(self, rows: pa.Table) -> list[tuple[object, ...]]:
        return list(zip(*(rows.column(k).to_pylist() for k in self._table.key), strict=True))

    def _hash(self, rows: pa.Table) -> list[int]:
        frame = pl.DataFrame(pl.from_arrow(rows.select(list(self._table.key))))
        parts = [pl.col(k).cast(pl.String).fill_null("\x00") for k in self._table.key]
        hashed = frame.select(pl.concat_str(parts, separator="\x1f").hash(0)).to_series()
        return np.asarray(hashed.to_numpy(), dtype=np.uint64).tolist()

    def _named(self, key: tuple[object, ...]) -> str:
        return ", ".join(f"`{k}` {v!r}" for k, v in zip(self._table.key, key, strict=True))
