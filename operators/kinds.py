"""Kinds of operators, what an operator declares, and what applying one returns."""

from dataclasses import dataclass
from typing import Literal

import polars as pl

from ..store.errors import OperatorError
from .scope import Sees

Kind = Literal["clean", "derive", "filter", "prioritize", "augment", "reshape"]
"""What an operator may do to rows; `invariants` checks it."""

KEEP, REASON = "keep", "reason"
"""Columns by which a filter's body may mark every row, instead of leaving rows out."""
MARKS = {KEEP: pl.Boolean(), REASON: pl.String()}
"""Their types."""


@dataclass(frozen=True)
class Applied:
    """The result of an operator."""

    rows: pl.DataFrame
    dropped: pl.DataFrame
    """Ids of dropped rows, each with its `reason`."""
    failed: pl.DataFrame
    """Ids of rows on which it failed, each with its `error`."""


@dataclass(frozen=True, kw_only=True)
class OperatorSpec:
    """What the invariants of an operator, and the search for rows on which it fails, are about."""

    name: str
    kind: Kind
    writes: tuple[str, ...]
    """Columns that it sets or adds."""
    scope: Sees
    """What the result for a row depends on: that row alone, its group, or all rows."""
    whole_groups: bool
    """Whether it computes over, or keeps and drops, groups as a whole."""
    links: tuple[str, ...]
    """For a reshape: columns of the new rows that hold ids of the rows they were made from."""

    def error(self, message: str) -> OperatorError:
        """Build an error that names this operator."""
        return OperatorError(f"operator `{self.name}` ({self.kind}): {message}")

    def apply_once(self, rows: pl.DataFrame, *, among: pl.DataFrame | None = None) -> Applied:
        """Apply it to rows in one piece; `among` are all rows, if these are a part of them."""
        raise NotImplementedError

    def columns_after(self, given: pl.Schema) -> pl.Schema:
        """Return the columns that rows with the columns `given` have afterwards."""
        raise NotImplementedError
