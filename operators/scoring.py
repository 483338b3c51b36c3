"""Score rows with a reward function."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any, cast

import polars as pl
import pyarrow as pa

from ..store.errors import OperatorError, SchemaError
from ..store.records import Experience, Task, proper
from . import rewards
from .body import ERROR, Batches, Declared
from .concurrency import answers
from .decorator import operator
from .import_path import find_function, taken_apart
from .reward_protocol import Spec, Verdict, looks_at, with_parameters
from .scope import places_by_group
from .source_digest import digest, is_identified, is_ours

TIMEOUT = 300.0
"""Seconds that one call may take: a judge may be asked again, or a sandbox may have a queue."""

Row = Mapping[str, Any]
Judged = tuple[float | None, str | None]
"""The reward of a row, and its reason or error."""
Scored = tuple[Judged, str | None]
"""The reward of a row with its reason, and the error if the function raised."""
_NONE: Judged = (None, None)

_COLUMNS = {
    "reward": pl.Float64(),
    "scorer": pl.String(),
    "scorer_version": pl.String(),
    "detail": pl.String(),
}
_READS = ("experience_id", "task_id", "answer")
_CREDIT = ("advantage", "priority")
"""Columns that follow from rewards. They are hidden from reward functions: they differ between
pipelines, so the cache would not find a row's verdict again."""
_FACTS = tuple(f.name for f in fields(Experience) if f.name not in (*_READS, *_CREDIT))
_MAY_READ = (*_FACTS, "task_messages", "task_metadata")
_SHOWN = frozenset({*_READS, *_MAY_READ})


@operator("derive", reads=_READS, may_read=_MAY_READ, writes=tuple(_COLUMNS), forgives=True)
def score(
    *,
    reward: str | dict[str, dict[str, Any] | None] | Callable[..., Any] = "exact_match",
    scorer_version: str | None = None,
    max_concurrency: int = 16,
    timeout: float | int = TIMEOUT,
) -> Declared:
    """Set `reward` with a reward function: a name, `package.module:function`, or a callable.

    `{name: {parameter: value}}` sets parameters. The rows need the task's `answer` in addition to
    the experience's columns (and `task_messages` or `task_metadata`, if the reward reads them):
    `SELECT e.*, t.answer, t.messages AS task_messages FROM experiences e JOIN tasks t USING
    (task_id)`. The reward is NULL where the function returns None or a number that is not finite,
    or raises; `detail` holds the reason or error. The function does not see `advantage` and
    `priority`, which follow from rewards. `scorer` (the name) and `scorer_version` (by default a
    digest of source and parameters) identify the function, as with `rlake rescore`. Of an `async`
    reward, at most `max_concurrency` calls run at once, each for `timeout` seconds. A judge of
    groups gets whole groups.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "task_id": "t", "answer": "4",
    ...                      "response_text": "4"})
    >>> rows.pipe(score(reward="exact_match")).select("reward", "scorer", "detail").rows()
    [(1.0, 'exact_match', None)]
    """
    name, function = reward_of(reward)
    version = scorer_version or digest(function)

    def batch(rows: pa.RecordBatch) -> pa.RecordBatch:
        shown = [{k: v for k, v in row.items() if k in _SHOWN} for row in rows.to_pylist()]
        made = score_rows(function, shown, max_concurrency=max_concurrency, timeout=timeout)
        columns = {
            "scorer": [name] * len(made),
            "scorer_version": [version] * len(made),
            "detail": [error or detail for (_, detail), error in made],
            ERROR: [error for _, error in made],
        }
        rewards = pa.array([value for (value, _), _ in made], pa.float64())
        texts = {n: pa.array(v, pa.string()) for n, v in columns.items()}
        return pa.record_batch({"reward": rewards, **texts})

    # rewards of ours that are not async are computed faster than they are looked up in the cache
    inner = function.func if isinstance(function, partial) else function
    body = Batches(
        batch,
        columns=_COLUMNS,
        tells_errors=True,
        is_quick=is_ours(inner) and not iscoroutinefunction(inner),
        by_group=looks_at(function) == "group",
    )
    reads = (*_READS, "group_id") if body.by_group else _READS
    code = (digest(function),) if is_identified(function) else ()
    return Declared(body=body, reads=reads, code=code)


def reward_of(spec: Spec | Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function of a reward, its parameters set.

    >>> reward_of({"overlong": {"max_tokens": 20, "cache": 10}})[0]
    'overlong'

    Raises OperatorError for an unknown name, or parameters that do not fit.
    """
    if callable(spec):
        return getattr(spec, "__name__", type(spec).__name__), with_parameters("it", spec, {})
    name, parameters = taken_apart(spec, "a reward", error=OperatorError)
    function = find_function(name, rewards, "reward", error=OperatorError)
    return short(name), with_parameters(name, function, parameters)


def short(name: str) -> str:
    """Return the name of a reward in `rewards` and `scores`: that of its function.

    >>> short("my.rewards:lenient")
    'lenient'
    """
    return name.rpartition(":")[2]


def score_rows(
    function: Callable[..., Any],
    rows: Iterable[Row],
    *,
    max_concurrency: int = 16,
    timeout: float = TIMEOUT,
) -> list[Scored]:
    """Return the reward of each row and its reason, and the error of one on which it raised.

    The rows are those of `experiences`, with the columns of their tasks that `score` describes. A
    judge of groups gets rows with the same `group_id` together; an error applies to all of them.
    """
    given = list(rows)
    if looks_at(function) == "row":

        async def one(row: Row) -> Judged:
            return verdict(await said(function(task_of(row), Experience.from_row(row))))

        found = answers(one, given, max_concurrency=max_concurrency, timeout=timeout)
        return [(judged or _NONE, error) for judged, error in found]

    async def group(places: list[int]) -> list[Scored]:
        rollouts = [Experience.from_row(given[i]) for i in places]
        return verdicts(await said(function(task_of(given[places[0]]), rollouts)), len(rollouts))

    units = places_by_group(row.get("group_id") for row in given)
    made: dict[int, Scored] = {}
    verdicts_of: Any = answers(group, units, max_concurrency=max_concurrency, timeout=timeout)
    for places, (values, error) in zip(units, verdicts_of, strict=True):
        made |= zip(places, values or [(_NONE, error)] * len(places), strict=True)
    return [made[i] for i in range(len(given))]


async def said(made: Any | Awaitable[Any]) -> Any:
    """Return what a reward function returned, waiting for it if it is `async`."""
    return await made if isawaitable(made) else made


def verdict(value: Any) -> Judged:
    """Return a reward and its reason; raises SchemaError unless it is a finite number or None."""
    detail = None
    if isinstance(value, Verdict):
        value, detail = value.value, proper(value.detail) if value.detail else value.detail
    if value is None:
        return None, detail
    number = float(value)
    # true of NaN and infinity only
    if number - number != 0:
        raise SchemaError(f"the reward is {number}, expected a finite number or None")
    return number, detail


def verdicts(values: Any, number: int) -> list[Scored]:
    """Return the rewards of a group; raises SchemaError unless there is one for each rollout."""
    if not isinstance(values, Sequence) or len(cast(Sequence[Any], values)) != number:
        raise SchemaError(
            f"a judge of groups returned {values!r} for {number} rollouts, expected a list"
        )
    return [(verdict(value), getattr(value, "error", None)) for value in values]


def task_of(row: Row) -> Task:
    """Return the task of a row, from its columns: answer, conversation and metadata."""
    messages, metadata = row.get("task_messages"), row.get("task_metadata")
    return Task(
        messages=json.loads(messages) if messages else [],
        answer=row.get("answer"),
        metadata=json.loads(metadata) if metadata else None,
    )
