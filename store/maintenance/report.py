"""The report of `maintain`: each table before and after."""

from dataclasses import asdict, dataclass
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
        return [
            (c.table, *_pair(c, "fragments"), *_megabytes(c), *_pair(c, "versions"),
             *_pair(c, "new_rows"), *_milliseconds(c), c.left or "")
            for c in self.tables
            if c.before.fragments or c.before.versions > 1
        ]  # fmt: skip

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


def _pair(cared: Cared, name: str) -> tuple[Any, Any]:
    return getattr(cared.before, name), getattr(cared.after, name)


def _megabytes(cared: Cared) -> tuple[float, float]:
    before, after = _pair(cared, "num_bytes")
    return round(before / 1e6, 2), round(after / 1e6, 2)


def _milliseconds(cared: Cared) -> tuple[str, str]:
    before, after = ("" if v is None else f"{v:.1f}" for v in _pair(cared, "query_ms"))
    return before, after
