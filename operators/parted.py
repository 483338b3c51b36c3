"""Conversations that part at a question: two answers to different questions are no pair."""

import json
from contextlib import suppress
from functools import cache
from typing import Any

import polars as pl

from ..store.conversation import PARTED, why_no_pair

LATER = "_talk"
"""Column of a conversation of several answers; NULL of others."""
_WHY = "its conversation parts from others of its {} at a question, not at an answer"


def later() -> pl.Expr:
    """Return the conversations that may part at a question, which those of one answer do not."""
    messages = pl.col("messages").cast(pl.String)
    answers = messages.str.count_matches('"assistant"', literal=True)
    return pl.when(answers > 1).then(messages).alias(LATER)


def with_parted(both: pl.LazyFrame, rows: pl.LazyFrame) -> pl.LazyFrame:
    """Leave out pairs of a row and one `_worse` that part at a question."""
    talks = rows.select("experience_id", later()).drop_nulls(LATER)
    worse = talks.select(pl.all().name.suffix("_worse"))
    joined = both.join(talks, on="experience_id", how="left")
    joined = joined.join(worse, on="experience_id_worse", how="left")
    two = pl.struct(LATER, f"{LATER}_worse")
    part = two.map_batches(_parted, return_dtype=pl.Boolean)
    return joined.filter(~part).drop(LATER, f"{LATER}_worse")


def _parted(talks: pl.Series) -> pl.Series:
    good, bad = (talks.struct.field(name) for name in talks.struct.fields)
    if not (good.is_not_null() & bad.is_not_null()).any():
        return pl.Series([False]).new_from_index(0, len(talks))
    read = cache(_read)
    twos = zip(good, bad, strict=True)
    found = (
        a is not None and b is not None and why_no_pair(read(a), read(b)) == PARTED for a, b in twos
    )
    return pl.Series(list(found), dtype=pl.Boolean)


def _read(text: str) -> list[dict[str, Any]]:
    """Return a conversation, empty where the text is none: others say what is wrong with it."""
    with suppress(ValueError):
        talk = json.loads(text)
        if isinstance(talk, list) and all(isinstance(m, dict) for m in talk):
            return talk
    return []


def with_reason(rows: pl.DataFrame, *, unit: str, otherwise: str) -> pl.DataFrame:
    """Let rows whose `reason` is `otherwise` say so when others of their unit part from them."""
    asked = rows.filter(pl.col("reason") == otherwise).with_columns(later()).drop_nulls(LATER)
    if asked.is_empty():
        return rows
    two = asked.select(unit, "experience_id", LATER)
    both = two.join(rows.select(unit, "experience_id", later()), on=unit, suffix="_worse")
    part = pl.struct(LATER, f"{LATER}_worse").map_batches(_parted, return_dtype=pl.Boolean)
    ids = both.filter(part)["experience_id"].unique()
    is_told = pl.col("experience_id").is_in(ids.implode()) & (pl.col("reason") == otherwise)
    why = pl.when(is_told).then(pl.lit(_WHY.format(unit.removesuffix("_id"))))
    return rows.with_columns(why.otherwise("reason").alias("reason"))
