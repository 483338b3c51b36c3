"""Operators that tests of pipelines share: `from support.operators import copied, length`."""

from typing import Any

import polars as pl

from rlake.operators import operator


@operator("derive")
def length() -> pl.Expr:
    return pl.col("response_text").str.len_chars().cast(pl.Int64).alias("length")


@operator("augment", reads=("experience_id",), reads_all=True, scope="row")
def copied() -> Any:
    none = pl.lit(None, pl.String)

    def copy(frame: pl.LazyFrame) -> pl.LazyFrame:
        child = frame.with_columns(parent_id="experience_id", source=pl.lit("synthetic"))
        return child.with_columns(experience_id=none, group_id=none, created_at=pl.lit(None))

    return copy
