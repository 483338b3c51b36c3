"""The report of `maintain`: each table before and after."""

from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any


@dataclass(frozen=True)
class Look:
    """The state of a table at one moment."""

    fragments: int
    num_bytes: int
    """On disk, all versions together."""
    versions: int
    new_rows: int
    """Rows that an index lacks; searches scan them."""
    query_ms: float | None = None
    """Time of a lookup by key; None when it was not measured, or the table is empty."""

    @property
    def cells(self) -> tuple[Any, ...]:
        """The numbers as a table shows them, with megabytes."""
        took = "" if self.query_ms is None else f"{self.query_ms:.1f}"
        size = round(self.num_bytes / 1e6, 2)
        return self.fragments, size, self.versions, self.new_rows, took


@dataclass(frozen=True)
class Cared:
    """The effect on one table."""

    table: str
    before: Look
    after: Look
    left: str | None = None
    """Work left to another process, and why."""


@dataclass(frozen=True)
class Forgotten:
    """The effect of a retention rule."""

    rule: str
    table: str
    rows: int
    """Rows deleted; listed in `drops`."""
    kept: int
    """Rows that it selects but an unfinished run may need."""

    def __str__(self) -> str:
        kept = f", {self.kept:,} kept for unfinished runs" if self.kept else ""
        return f"rule `{self.rule}`: {self.rows:,} rows of `{self.table}`{kept}"


@dataclass(frozen=True)
class Report:
    """The effect of `maintain`; of a dry run, the expected effect."""

    tables: tuple[Cared, ...]
    """Only the tables that were examined."""
    forgotten: tuple[Forgotten, ...]
    seconds: float
    busy: str | None = None
    """The process that holds the lock, when nothing was done because of it."""
    is_dry_run: bool = False

    def __getitem__(self, table: str) -> Cared:
        """Return what was done for one table."""
        return {cared.table: cared for cared in self.tables}[table]

    def rows(self) -> list[tuple[Any, ...]]:
        """Return a line for each table that holds anything: name, then before and after."""
        made = []
        for c in self.tables:
            if c.before.fragments or c.before.versions > 1:
                pairs = zip(c.before.cells, c.after.cells, strict=True)
                made.append((c.table, *chain.from_iterable(pairs), c.left or ""))
        return made

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        made = asdict(self)
        return made | {"tables": {table.pop("table"): table for table in made["tables"]}}

    def __str__(self) -> str:
        if self.busy:
            return f"nothing done: {self.busy}"
        lines = [
            f"{row[0]}: files {row[1]} -> {row[2]}, MB {row[3]} -> {row[4]}, "
            f"versions {row[5]} -> {row[6]}" + (f" ({row[-1]})" if row[-1] else "")
            for row in self.rows()
        ]
        return "\n".join([*lines, *map(str, self.forgotten), f"{self.seconds:.2f} s"])


COLUMNS = ("table", "files", "after", "MB", "after", "versions", "after", "not indexed", "after",
           "query ms", "after", "left to others")  # fmt: skip
"""Headings of `Report.rows`."""
