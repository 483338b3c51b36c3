"""The store's tables as they are read for an export: a few rows ahead, not thousands."""

from typing import Any, cast

import lance
import pyarrow as pa
import pyarrow.dataset as ds

from ..query import QuerySession
from ..store import Store

_ROWS, _BYTES, _AHEAD = 256, 4 << 20, 2
_BUFFER_BYTES = 32 << 20


class _Few(ds.Dataset):
    """A table of which DuckDB reads few rows at a time: Lance reads 16 times 8,192 ahead."""

    def __init__(self, dataset: lance.LanceDataset) -> None:
        self._dataset = dataset

    @property
    def schema(self) -> pa.Schema:
        return self._dataset.schema

    def scanner(self, columns: Any = None, filter: Any = None, **_: Any) -> ds.Scanner:
        return self._dataset.scanner(
            columns=columns,
            filter=filter,
            batch_size=_ROWS,
            batch_size_bytes=_BYTES,
            batch_readahead=_AHEAD,
            fragment_readahead=1,
            io_buffer_size=_BUFFER_BYTES,
        )


def stored_rows(store: Store) -> QuerySession:
    """Return a session over the store's tables, for reading very many rows."""
    console = QuerySession()
    console.show(
        store.versions(),
        lambda name, version: cast("lance.LanceDataset", _Few(store.open_at(name, version))),
    )
    return console
