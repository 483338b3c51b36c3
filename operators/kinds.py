"""Kinds of operators, what an operator declares, and what applying one returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import polars as pl

from ..store.errors import OperatorError
from .scope import Sees

Kind = Literal["clean", "derive", "filter", "prioritize", "augment", "reshape"]
"""What an operator may do, by the law that it obeys; see `laws`."""


KEEP, REASON = "keep", "reason"
"""Columns by which a filter's body may mark every row, instead of leaving rows out."""


@dataclass(frozen=True)
class Applied:
    """What an operator made of rows."""

    rows: pl.DataFrame
    dropped: pl.DataFrame
    """The ids of rows that went, each with its `reason`."""
    failed: pl.DataFrame
    """The ids of rows on which it raised, each with its `error`."""


class OperatorSpec(Protocol):
    """What the checks of an operator's invariants, and the search for failed rows, use of it."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def kind(self) -> Kind:
        """What it may do."""
        ...

    @property
    def writes(self) -> Sequence[str]:
        """Columns that it sets or adds."""
        ...

    @property
    def scope(self) -> Sees:
        """What it looks at to treat a row."""
        ...

    @property
    def whole_groups(self) -> bool:
        """Whether it computes over, or keeps and drops, groups as a whole."""
        ...

    @property
    def links(self) -> Sequence[str]:
        """For a reshape: columns of the new rows that name the rows they were made from."""
        ...

    def error(self, told: str, /) -> OperatorError:
        """Build an error that names the operator."""
        ...

    def apply_once(self, rows: pl.DataFrame, *, among: pl.DataFrame | None = None) -> Applied:
        """Apply it to rows that are not split; `among` are all rows."""
        ...

    def columns_after(self, given: pl.Schema) -> pl.Schema:
        """Return the columns of rows with the columns `given` after it."""
        ...
