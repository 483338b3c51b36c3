"""Choosing tasks by several values at once, and mixing tasksets by weights."""

import json
from typing import Any

import polars as pl
import pyarrow as pa

from ..store.errors import OperatorError, nearest
from .body import PLACE, Batches, Declared, Explained
from .decorator import operator
from .invariants import id_column
from .seeded_random import chance


@operator("derive", scope="row")
def text_quality(*, column: str = "prompt_text") -> pl.Expr:
    """Set `text_quality` to how much a text looks like prose or a question, from 0 to 1.

    The mean of two shares: characters that are letters or digits, of those that are no space, and
    words that are not repetitions, of all words. It finds broken markup, symbols and loops, and
    says nothing of the sense. NULL for a text that is NULL or blank.

    >>> rows = pl.DataFrame({"task_id": list("ab"),
    ...                      "prompt_text": ["How many eggs are left?", "<p> <p> <p> </p> ###"]})
    >>> rows.pipe(text_quality())["text_quality"].round(2).to_list()
    [0.97, 0.42]
    """
    text = pl.col(column)
    visible = text.str.count_matches(r"\S").cast(pl.Float64)
    plain = text.str.count_matches(r"[\p{L}\p{N}]").cast(pl.Float64)
    words = text.str.to_lowercase().str.extract_all(r"\S+")
    distinct = words.list.n_unique().cast(pl.Float64) / words.list.len().cast(pl.Float64)
    value = (plain / visible + distinct) / 2
    return pl.when(visible > 0).then(value).alias("text_quality")


@operator("prioritize")
def weighted_sum(*, weights: dict[str, float], into: str = "priority") -> Declared:
    """Set `priority` to a weighted sum of columns that go from 0 to 1, scaled to 0 to 1 again.

    A negative weight counts what the column lacks to 1, so that small values are wanted:
    `{text_quality: 1.0, difficulty: -0.7}` takes good and easy tasks first. The order is that of
    the plain weighted sum. NULL where a column is NULL; a column that leaves 0 to 1 may make it
    negative, which is an error.

    >>> rows = pl.DataFrame({"task_id": ["a", "b"], "text_quality": [1.0, 0.5],
    ...                      "difficulty": [0.5, 0.0]})
    >>> op = weighted_sum(weights={"text_quality": 1.0, "difficulty": -1.0})
    >>> rows.pipe(op)["priority"].to_list()
    [0.75, 0.75]
    """
    total = sum(abs(weight) for weight in weights.values())
    if not total:
        raise OperatorError("`weighted_sum` needs a weight that is not 0")
    parts = [
        abs(weight) * (pl.col(name) if weight > 0 else 1 - pl.col(name))
        for name, weight in weights.items()
    ]
    value = sum(parts[1:], parts[0]) / total
    return Declared(body=value.cast(pl.Float64).alias(into), writes=(into,))


@operator("filter", scope="all")
def mix(*, shares: dict[str, float], by: str = "taskset", rows: int | None = None) -> Declared:
    """Keep as many rows of each set as its share asks for, and of all sets as many as there can be.

    Shares are weights beside each other. Which rows of a set stay is decided by a hash of their
    ids: the same rows in the same way, whatever else is there. With `rows`, so many in all at most.
    Rows of sets without a share are dropped. A set with a share, but without any row, is an error.

    >>> tasks = pl.DataFrame({"task_id": list("abcdef"), "taskset": ["easy"] * 4 + ["hard"] * 2})
    >>> tasks.pipe(mix(shares={"easy": 1, "hard": 2}))["taskset"].to_list()
    ['easy', 'hard', 'hard']
    """
    if not shares or min(shares.values()) <= 0:
        raise OperatorError(f"`shares` of `mix` must be above 0 for each set, got {shares}")
    total = sum(shares.values())

    def mark(given: pl.DataFrame) -> pl.DataFrame:
        counts = dict(given.group_by(by).len().rows())
        for name in shares:
            if name not in counts:
                known = [value for value in counts if value is not None]
                raise OperatorError(f"no row has the {by} `{name}`{nearest(name, known)}")
        most = min(counts[name] * total / share for name, share in shares.items())
        most = most if rows is None else min(most, rows)
        wanted = {name: int(most * share / total + 1e-9) for name, share in shares.items()}
        order = pl.Series(PLACE, [chance(0, i) for i in given[id_column(given.columns)]])
        quota = pl.col(by).replace_strict(wanted, default=0, return_dtype=pl.Int64)
        rank = pl.col(PLACE).rank("ordinal").over(by)
        return given.with_columns(order).with_columns(keep=rank <= quota).drop(PLACE)

    def body(frame: pl.LazyFrame) -> pl.LazyFrame:
        schema = {**frame.collect_schema(), "keep": pl.Boolean()}
        return frame.map_batches(lambda one: mark(one) if one.height else _none(one), schema=schema)

    message = pl.when(pl.col(by).is_in(list(shares))).then(
        pl.format("the {} `{}` has its share of the mix already", pl.lit(by), by)
    )
    reason = message.otherwise(pl.format("the {} `{}` has no share of the mix", pl.lit(by), by))
    return Declared(body=Explained(body, reason=reason), reads=(by,))


def _none(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_columns(keep=pl.lit(None, pl.Boolean))


@operator("clean")
def prompt_into_messages() -> Batches:
    """Set the last user message of `messages` to `prompt_text`, as a cleaner of texts left it.

    Put it behind operators that clean `prompt_text` of tasks: what is tried is `messages`. A row
    without a user message, or without a prompt, stays as it is.

    >>> rows = pl.DataFrame({"task_id": ["a"], "prompt_text": ["2+2="],
    ...                      "messages": ['[{"role": "user", "content": " 2+2="}]']})
    >>> rows.pipe(prompt_into_messages())["messages"][0]
    '[{"role": "user", "content": "2+2="}]'
    """

    def put(batch: pa.RecordBatch) -> pa.RecordBatch:
        pairs = zip(batch["messages"].to_pylist(), batch["prompt_text"].to_pylist(), strict=True)
        return pa.record_batch({"messages": pa.array([_with(m, p) for m, p in pairs], pa.string())})

    return Batches(put, columns={"messages": pl.String})


def _with(messages: str | None, prompt: str | None) -> str | None:
    if messages is None or prompt is None:
        return messages
    summary: list[dict[str, Any]] = json.loads(messages)
    users = [message for message in summary if message.get("role") == "user"]
    if not users or users[-1].get("content") == prompt:
        return messages
    users[-1]["content"] = prompt
    return json.dumps(summary, ensure_ascii=False)
