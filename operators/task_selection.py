"""Select tasks by several values, and mix tasksets by weights."""

import json
from typing import Annotated, Any

import polars as pl
import pyarrow as pa
from pydantic import Field

from ..store.errors import OperatorError, nearest
from .body import PLACE, Batches, Declared, Explained, on_all_rows
from .decorator import operator
from .invariants import id_column
from .parameters import Positive
from .statistics import seeded_uniform


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
def mix_tasksets(
    *,
    shares: Annotated[dict[str, Positive], Field(min_length=1)],
    by: str = "taskset",
    rows: int | None = None,
) -> Declared:
    """Keep rows of several tasksets in given proportions, as many as possible.

    `shares` are relative weights. Which rows of a set are kept follows from a hash of their ids, so
    it does not depend on other rows. `rows` limits the total. Rows of sets without a share are
    dropped; a set that has a share and no rows is an error.

    >>> tasks = pl.DataFrame({"task_id": list("abcdef"), "taskset": ["easy"] * 4 + ["hard"] * 2})
    >>> tasks.pipe(mix_tasksets(shares={"easy": 1, "hard": 2}))["taskset"].to_list()
    ['easy', 'hard', 'hard']
    """
    total = sum(shares.values())

    def mark(given: pl.DataFrame) -> pl.DataFrame:
        if given.is_empty():  # no set is missing from no rows
            return given.with_columns(keep=pl.lit(None, pl.Boolean))
        counts = dict(given.group_by(by).len().rows())
        for name in shares:
            if name not in counts:
                known = [value for value in counts if value is not None]
                raise OperatorError(f"no row has the {by} `{name}`{nearest(name, known)}")
        most = min(counts[name] * total / share for name, share in shares.items())
        most = most if rows is None else min(most, rows)
        # 1e-9: a quota that is a whole number but for rounding must not lose a row to `int`.
        wanted = {name: int(most * share / total + 1e-9) for name, share in shares.items()}
        order = pl.Series(PLACE, [seeded_uniform(0, i) for i in given[id_column(given.columns)]])
        quota = pl.col(by).replace_strict(wanted, default=0, return_dtype=pl.Int64)
        rank = pl.col(PLACE).rank("ordinal").over(by)
        return given.with_columns(order).with_columns(keep=rank <= quota).drop(PLACE)

    has_share = pl.col(by).is_in(list(shares))
    full = pl.format("the {} `{}` has its share of the mix already", pl.lit(by), by)
    none = pl.format("the {} `{}` has no share of the mix", pl.lit(by), by)
    reason = pl.when(has_share).then(full).otherwise(none)
    return Declared(
        body=Explained(on_all_rows(mark, {"keep": pl.Boolean}), reason=reason), reads=(by,)
    )


@operator("clean")
def prompt_into_messages() -> Batches:
    """Set the last user message of `messages` to `prompt_text`, as a cleaner of texts left it.

    Add it after operators that clean `prompt_text` of tasks: the policy is asked `messages`. A row
    without a user message, or without a prompt, is unchanged.

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
