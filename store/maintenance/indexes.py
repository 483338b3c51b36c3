"""Scalar and full-text indexes: created when a table is large, then kept up to date."""

from dataclasses import dataclass

import lance

_MANY_NEW_ROWS = 20_000


@dataclass(frozen=True)
class Index:
    """An index on one column, and the number of rows from which it pays off."""

    table: str
    column: str
    kind: str
    worth_rows: int

    @property
    def name(self) -> str:
        """What Lance calls it."""
        return f"{self.column}_idx"


INDEXES = (
    Index("experiences", "experience_id", "BTREE", 100_000),
    Index("experiences", "batch", "BTREE", 100_000),
    Index("experiences", "response_text", "INVERTED", 10_000),
    Index("scores", "experience_id", "BTREE", 100_000),
    Index("experience_values", "experience_id", "BTREE", 100_000),
    Index("draws", "experience_id", "BTREE", 100_000),
    Index("draws", "step", "BTREE", 100_000),
)
"""Indexes for queries of the command line and the trainer; below `worth_rows` a scan is as fast."""


def new_rows(name: str, dataset: lance.LanceDataset) -> int:
    """Return the largest number of rows that an index of a table lacks."""
    wanted = [index for index in INDEXES if index.table == name]
    known = _known(dataset) if wanted else {}
    rows = dataset.count_rows()
    pays = [i for i in wanted if i.name in known or rows >= i.worth_rows]
    missing = [rows - known.get(i.name, 0) for i in pays]
    return max(0, *missing) if missing else 0


def is_due(name: str, dataset: lance.LanceDataset) -> bool:
    """Return whether an index lacks so many rows that searches become slow."""
    return new_rows(name, dataset) >= _MANY_NEW_ROWS


def refresh(name: str, dataset: lance.LanceDataset) -> None:
    """Create the indexes that a table is large enough for, and add new rows to the others."""
    known, rows = _known(dataset), dataset.count_rows()
    wanted = [index for index in INDEXES if index.table == name]
    behind = [i.name for i in wanted if i.name in known and known[i.name] < rows]
    if behind:
        dataset.optimize.optimize_indices(index_names=behind)
    for index in wanted:
        if index.name not in known and rows >= index.worth_rows:
            dataset.create_scalar_index(index.column, index.kind, name=index.name)  # pyright: ignore[reportArgumentType]


def _known(dataset: lance.LanceDataset) -> dict[str, int]:
    """Return the number of rows in each index, by name."""
    return {index.name: index.num_rows_indexed for index in dataset.describe_indices()}
