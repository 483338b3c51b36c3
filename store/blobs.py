"""Tables with blobs as DuckDB and Polars read them: bytes only where a query names the column."""

from collections.abc import Iterable
from typing import Any

import lance
import pyarrow as pa
import pyarrow.dataset as pds

from .schema import TABLES

AS_BYTES: dict[str, Any] = {
    "blob_handling": "all_binary",
    "batch_size": 64,
    "batch_size_bytes": 16 << 20,
    "batch_readahead": 1,
    "fragment_readahead": 1,
}
"""Options of Lance's scanner that give the bytes of blobs, few rows at a time."""


class BlobDataset(pds.Dataset):
    """A Lance dataset whose blobs read as bytes; Lance itself gives where they lie."""

    def __init__(self, rows: lance.LanceDataset, names: Iterable[str]) -> None:
        self._rows, self._names = rows, frozenset(names)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the dataset, blobs as binary."""
        fields = [
            pa.field(f.name, pa.large_binary(), f.nullable) if f.name in self._names else f
            for f in self._rows.schema
        ]
        return pa.schema(fields, self._rows.schema.metadata)

    def scanner(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, columns: list[str] | None = None, filter: Any = None, **_: Any
    ) -> pds.Scanner:
        """Scan rows, few at a time if their blobs are wanted."""
        if columns is not None and not self._names & set(columns):
            return self._rows.scanner(columns=columns, filter=filter)
        return self._rows.scanner(columns=columns, filter=filter, **AS_BYTES)


def readable(name: str, rows: lance.LanceDataset) -> lance.LanceDataset | pds.Dataset:
    """Return a table as DuckDB and Polars can read it."""
    blobs = [c.name for c in TABLES[name].columns if c.is_blob] if name in TABLES else []
    return BlobDataset(rows, blobs) if blobs else rows
