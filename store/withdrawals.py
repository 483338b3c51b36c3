"""Which rows count after imports and pipeline runs were taken back, as Polars expressions."""

from collections.abc import Sequence

import polars as pl

from .schema import TABLES


def taken_back(withdrawals: pl.DataFrame) -> list[str]:
    """Return the lineages that are taken back, by their newest row in `withdrawals`."""
    newest = withdrawals.sort("created_at").unique("lineage_id", keep="last")
    return sorted(newest.filter("is_withdrawn")["lineage_id"])


def kept(members: pl.DataFrame, table: str, gone: Sequence[str]) -> pl.Series:
    """Return the ids of a table's rows that a lineage that counts contains too."""
    counts = (pl.col("table_name") == table) & ~pl.col("lineage_id").is_in(gone)
    return members.filter(counts)["row_id"]


def is_gone(table: str, gone: Sequence[str], kept: pl.Series) -> pl.Expr:
    """Whether a row was taken back, and no lineage that counts contains it too."""
    by_gone = pl.col("lineage_id").is_in(gone).fill_null(value=False)
    return by_gone & ~row_id(table).is_in(kept.implode())


def row_id(table: str) -> pl.Expr:
    """The id of a row in `members`: its key, joined by spaces."""
    return pl.concat_str(TABLES[table].key, separator=" ").alias("row_id")
