"""Kinds of operators, and what applying one returns."""

from dataclasses import dataclass
from typing import Literal

import polars as pl

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
