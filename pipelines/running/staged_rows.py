"""Rows queued for the next stage, in the store or spilled, read one partition at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import polars as pl

from ...store import Store
from ...store.errors import StoreError
from ...store.schema import table
from ...store.schema_versions import take
from .spill import Spilled

_SAMPLE = 512
"""Rows whose sizes are measured to estimate all; sizes of token columns are computed."""
_TOKEN_BYTES = {"token_ids": 4.0, "loss_mask": 0.125, "logprobs": 4.0, "teacher_logprobs": 4.0}


@dataclass(frozen=True)
class Stored:
    """Rows of a table at one version, by address; can be sent to other processes."""

    table: str
    root: str
    branch: str | None
    storage_options: Mapping[str, str] | None
    versions: Mapping[str, int]
    addresses: np.ndarray
    schema: pl.Schema

    @classmethod
    def at(cls, past: Store, name: str, addresses: np.ndarray) -> Self:
        """Return rows of a table of the store at its versions."""
        empty = pl.DataFrame(pl.from_arrow(table(name).schema.empty_table()))
        return cls(
            name,
            past.root,
            past.branch_name,
            past.storage_options,
            past.versions(),
            addresses,
            empty.schema,
        )

    @property
    def height(self) -> int:
        """The number of rows."""
        return len(self.addresses)

    def sizes(self, columns: Sequence[str]) -> np.ndarray:
        """Return the approximate size of each row: from its tokens, and a sample of the rest."""
        tokens = [n for n in columns if n in _TOKEN_BYTES]
        rest = [n for n in columns if n not in _TOKEN_BYTES]
        # Spread over all rows, because rows of the same time are of similar size.
        every = max(1, self.height // _SAMPLE)
        sample = self.read(np.arange(0, self.height, every), rest)
        sizes = np.full(self.height, sample.estimated_size() / max(sample.height, 1))
        if tokens:
            message = self.light(["num_tokens"])["num_tokens"].fill_null(0).to_numpy()
            sizes = sizes + message * sum(_TOKEN_BYTES[n] for n in tokens)
        return sizes

    def light(self, columns: Sequence[str]) -> pl.DataFrame:
        """Return some columns of all rows."""
        return self.read(np.arange(self.height), columns)

    def read(self, places: np.ndarray, columns: Sequence[str]) -> pl.DataFrame:
        """Return the rows at some indices, in the order of the indices."""
        dataset = self._store().dataset(self.table)
        there = [n for n in columns if n in dataset.schema.names]
        found = take(dataset, self.addresses[places].tolist(), there)
        if there and found.num_rows != len(places):
            raise StoreError(
                f"table `{self.table}` of `{self.root}` lacks {len(places) - found.num_rows} rows "
                f"of its version {self.versions[self.table]}; run `rlake doctor`"
            )
        rows = pl.DataFrame(pl.from_arrow(found)) if there else pl.DataFrame(height=len(places))
        # a version of the table may be older than a column
        later = [pl.lit(None, self.schema[n]).alias(n) for n in columns if n not in there]
        return rows.with_columns(later).select(columns)

    def _store(self) -> Store:
        # opened where it is read: this may be another process, and handles cannot be sent
        return Store(
            self.root,
            storage_options=self.storage_options,
            versions=self.versions,
            branch=self.branch,
        )


@dataclass(frozen=True)
class Part:
    """A partition of a stage: indices in the stage and in the base, and extra columns."""

    places: np.ndarray
    at: np.ndarray
    extra: pl.DataFrame | None


@dataclass(frozen=True)
class StagedRows:
    """Rows of a base, or some of them, with extra columns that are new or replace its own."""

    base: Stored | Spilled
    schema: pl.Schema
    """Columns of the rows, in order; the base may have more."""
    at: np.ndarray
    """Indices of the rows in the base."""
    extra: pl.DataFrame | None = None

    @classmethod
    def all_of(cls, base: Stored | Spilled, columns: Sequence[str] | None = None) -> Self:
        """Return all rows of a base, with some of its columns."""
        schema = base.schema if columns is None else {n: base.schema[n] for n in columns}
        return cls(base, pl.Schema(schema), np.arange(base.height))

    @property
    def height(self) -> int:
        """The number of rows."""
        return len(self.at)

    def light(self, columns: Sequence[str]) -> pl.DataFrame:
        """Return some columns of all rows."""
        return self.read(self.part(np.arange(self.height)), columns)

    def part(self, places: np.ndarray) -> Part:
        """Return a partition: the rows at some indices."""
        extra = None if self.extra is None else self.extra[places]
        return Part(places, self.at[places], extra)

    def read(self, part: Part, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return the rows of a partition."""
        names = list(self.schema if columns is None else columns)
        known = () if part.extra is None else part.extra.columns
        rows = self.base.read(part.at, [n for n in names if n not in known])
        if part.extra is not None:
            rows = rows.with_columns(part.extra.select(n for n in known if n in names))
        return rows.select(names)

    def sizes(self) -> np.ndarray:
        """Return the approximate size of each row in bytes."""
        known = () if self.extra is None else self.extra.columns
        return self.base.sizes([n for n in self.schema if n not in known])[self.at]

    def kept(self, is_kept: np.ndarray) -> Self:
        """Return the rows that are kept."""
        extra = None if self.extra is None else self.extra.filter(pl.lit(pl.Series(is_kept)))
        return replace(self, at=self.at[is_kept], extra=extra)

    def with_columns(self, rows: pl.DataFrame) -> Self:
        """Add columns, replacing those of the same name."""
        old = pl.DataFrame(height=self.height) if self.extra is None else self.extra
        schema = pl.Schema({**self.schema, **rows.schema})
        return replace(self, schema=schema, extra=old.with_columns(rows.get_columns()))
