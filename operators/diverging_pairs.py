"""Conversations that diverge at a question: answers to different questions are not a pair."""

import json
import re
from contextlib import suppress
from functools import cache, partial
from itertools import combinations
from typing import Any

import polars as pl

from ..store.conversation import PARTED, is_answer, why_no_pair

LATER = "_conversation"
"""Column of a conversation of several answers; NULL of others."""
_PLAIN = re.compile(r'\{"role": ?"assistant", ?"content": ?"([^"\\]*)"\}')
_scan = json.JSONDecoder().raw_decode
_WHY = "its conversation parts from others of its {} at a question, not at an answer"


def later() -> pl.Expr:
    """Return the conversations that may diverge at a question: those of several answers."""
    messages = pl.col("messages").cast(pl.String)
    answers = messages.str.count_matches('"assistant"', literal=True)
    return pl.when(answers > 1).then(messages).alias(LATER)


def with_parted(both: pl.LazyFrame, rows: pl.LazyFrame, *, unit: str) -> pl.LazyFrame:
    """Leave out pairs of a row and one `_worse` of its unit that diverge at a question."""
    return both.map_batches(partial(_without_parted, rows=rows, unit=unit))


def _without_parted(both: pl.DataFrame, *, rows: pl.LazyFrame, unit: str) -> pl.DataFrame:
    ids = pl.concat([both["experience_id"], both["experience_id_worse"]]).unique()
    paired = rows.filter(pl.col("experience_id").is_in(ids.implode()))
    conversations = _may_part(paired.select(unit, "experience_id", later()).collect(), unit=unit)
    if conversations.is_empty():
        return both
    conversations = conversations.select("experience_id", LATER)
    worse = conversations.select(pl.all().name.suffix("_worse"))
    joined = both.join(conversations, on="experience_id", how="left", maintain_order="left")
    joined = joined.join(worse, on="experience_id_worse", how="left", maintain_order="left")
    two = pl.struct(LATER, f"{LATER}_worse")
    part = two.map_batches(_parted, return_dtype=pl.Boolean)
    return joined.filter(~part).drop(LATER, f"{LATER}_worse")


def _may_part(rows: pl.DataFrame, *, unit: str) -> pl.DataFrame:
    """Return the conversations of units in which some may diverge at a question."""
    conversations = rows.drop_nulls(LATER)
    units = conversations.group_by(unit, maintain_order=True).agg(LATER)
    asked = [len(texts) > 1 and _some_may_part(texts) for texts in units[LATER].to_list()]
    return conversations.join(
        units.filter(pl.Series(asked, dtype=pl.Boolean)), on=unit, how="semi", nulls_equal=True
    )


def _some_may_part(texts: list[str], start: int = 1) -> bool:
    """Return whether conversations may diverge at a question: only False is certain.

    Their common beginning is compared as text, and only the next message is parsed.
    """
    low, high = min(texts), max(texts)
    if low == high:
        return False
    try:
        start = _start_of_difference(low, high, start)
        plain = {m[1] for text in texts if (m := _PLAIN.match(text, start))}
        if len(plain) == len(texts):
            return False
        answers = [_answer_at(text, start) for text in texts]
    except (ValueError, IndexError):
        return True
    found: dict[str, list[str]] = {}
    for (spelled, _), text in zip(answers, texts, strict=True):
        found.setdefault(spelled, []).append(text)
    distinct = dict(answers).values()
    contents = [content for content in distinct if isinstance(content, str)]
    others = [message for message in distinct if not isinstance(message, str)]
    if len(set(contents)) < len(contents) or any(a == b for a, b in combinations(others, 2)):
        return True  # equal answers in different JSON
    return any(len(some) > 1 and _some_may_part(some, start) for some in found.values())


def _start_of_difference(low: str, high: str, start: int) -> int:
    """Return where the first message begins whose text differs between the first and the last."""
    while high.startswith(low[start : (end := _scan(low, start)[1])], start):
        if low[end] != high[end] or low[end] == "]":
            raise ValueError("one ends where another continues")
        start = end + 2 if low[end + 1] == " " else end + 1
    return start


def _answer_at(text: str, start: int) -> tuple[str, Any]:
    """Return an answer as JSON, and its text, or the whole message if it is more than text.

    Raises ValueError if it is not an answer.
    """
    if found := _PLAIN.match(text, start):
        return found[0], found[1]
    message, end = _scan(text, start)
    if not isinstance(message, dict) or not is_answer(message):
        raise ValueError("it is not an answer")
    content = message.get("content")
    is_plain = isinstance(content, str) and len(message) == 2
    return text[start:end], content if is_plain else message


def _parted(conversations: pl.Series) -> pl.Series:
    good, bad = (conversations.struct.field(name) for name in conversations.struct.fields)
    if not (good.is_not_null() & bad.is_not_null()).any():
        return pl.Series([False]).new_from_index(0, len(conversations))
    read = cache(_read)
    twos = zip(good, bad, strict=True)
    found = (
        a is not None and b is not None and why_no_pair(read(a), read(b)) == PARTED for a, b in twos
    )
    return pl.Series(list(found), dtype=pl.Boolean)


def _read(text: str) -> list[dict[str, Any]]:
    """Return a conversation, empty if the text is not one: other checks report that."""
    with suppress(ValueError):
        conversation = json.loads(text)
        if isinstance(conversation, list) and all(isinstance(m, dict) for m in conversation):
            return conversation
    return []


def with_reason(rows: pl.DataFrame, *, unit: str, otherwise: str) -> pl.DataFrame:
    """Replace the `reason` `otherwise` of rows from which others of their unit diverge."""
    two = rows.select(unit, "experience_id", "reason", later())
    asked = two.filter(pl.col("reason") == otherwise).drop_nulls(LATER)
    if asked.is_empty():
        return rows
    conversations = _may_part(two, unit=unit)
    both = asked.join(conversations, on=unit, suffix="_worse")
    part = pl.struct(LATER, f"{LATER}_worse").map_batches(_parted, return_dtype=pl.Boolean)
    ids = both.filter(part)["experience_id"].unique()
    diverges = pl.col("experience_id").is_in(ids.implode()) & (pl.col("reason") == otherwise)
    why = pl.when(diverges).then(pl.lit(_WHY.format(unit.removesuffix("_id"))))
    return rows.with_columns(why.otherwise("reason").alias("reason"))
