"""Scoring stored rows: a reward function applied again, or for the first time."""

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
from .async_map import answers
from .body import ERROR, Batches, Declared
from .decorator import operator
from .resolve import named
from .reward_protocol import Spec, Verdict, looks_at, with_parameters
from .scope import places_by_group
from .source_digest import digest, is_ours

SECONDS = 300.0
"""Longest time of one call that waits: a judge that is asked again, or a queue for a sandbox."""

Row = Mapping[str, Any]
Judged = tuple[float | None, str | None]
"""The reward of a row, and its reason, or what went wrong."""
Tried = tuple[Judged, str | None]
"""The reward of a row with its reason, and the error of one that raised."""
_NONE: Judged = (None, None)

_COLUMNS = {
    "reward": pl.Float64(),
    "scorer": pl.String(),
    "scorer_version": pl.String(),
    "detail": pl.String(),
}
_READS = ("experience_id", "task_id", "answer")
_CREDIT = ("advantage", "priority")
"""What follows from rewards is not shown to one, or another chain would be another question."""
_FACTS = tuple(f.name for f in fields(Experience) if f.name not in (*_READS, *_CREDIT))
_MAY_READ = (*_FACTS, "task_messages", "task_metadata")
_SHOWN = frozenset({*_READS, *_MAY_READ})


@operator("derive", reads=_READS, may_read=_MAY_READ, writes=tuple(_COLUMNS), forgives=True)
def score(
    *,
    reward: str | dict[str, dict[str, Any] | None] | Callable[..., Any] = "exact_match",
    scorer_version: str | None = None,
    at_once: int = 16,
    seconds: float | int = SECONDS,
) -> Declared:
    """Set `reward` by a reward function: one of ours by name, `package.module:function`, or itself.

    `{name: {parameter: value}}` gives it parameters. The rows need the task's `answer` beside the
    experience's columns (and `task_messages` or `task_metadata`, for a reward that reads them):
    `SELECT e.*, t.answer, t.messages AS task_messages FROM experiences e JOIN tasks t USING
    (task_id)`. A reward that is None, or not finite, or raises, is NULL; `detail` keeps what went
    wrong, or the reason that it gave. The reward sees the row's facts, and not `advantage` and
    `priority`, which follow from rewards. `scorer` (the name) and `scorer_version` (by default a
    digest of its source and parameters) say who judged, as with `rlake rescore`. Of an `async`
    reward, at most `at_once` calls are under way, each for `seconds`. A judge of groups sees whole
    groups.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "task_id": "t", "answer": "4",
    ...                      "response_text": "4"})
    >>> rows.pipe(score(reward="exact_match")).select("reward", "scorer", "detail").rows()
    [(1.0, 'exact_match', None)]
    """
    name, function = reward_of(reward)
    version = scorer_version or digest(function)

    def batch(rows: pa.RecordBatch) -> pa.RecordBatch:
        shown = [{k: v for k, v in row.items() if k in _SHOWN} for row in rows.to_pylist()]
        message = tried(function, shown, at_once=at_once, seconds=seconds)
        made = {
            "reward": [value for (value, _), _ in message],
            "scorer": [name] * len(message),
            "scorer_version": [version] * len(message),
            "detail": [detail if error is None else error for (_, detail), error in message],
            ERROR: [error for _, error in message],
        }
        kinds = (pa.float64(), *[pa.string()] * 4)
        return pa.record_batch(
            {n: pa.array(v, k) for (n, v), k in zip(made.items(), kinds, strict=True)}
        )

    # our own rewards that wait for nothing are worked out sooner than they are looked up
    inner = function.func if isinstance(function, partial) else function
    body = Batches(
        batch,
        columns=_COLUMNS,
        tells_errors=True,
        is_quick=is_ours(inner) and not iscoroutinefunction(inner),
        by_group=looks_at(function) == "group",
    )
    return Declared(body=body, reads=(*_READS, "group_id") if body.by_group else _READS)


def reward_of(spec: Spec | Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function of a reward, its parameters set.

    >>> reward_of({"overlong": {"max_tokens": 20, "cache": 10}})[0]
    'overlong'

    Raises OperatorError for an unknown name, or parameters that do not fit.
    """
    if callable(spec):
        return getattr(spec, "__name__", type(spec).__name__), with_parameters("it", spec, {})
    if isinstance(spec, str):
        name, parameters = spec, {}
    elif len(spec) == 1:
        [(name, parameters)] = spec.items()
    else:
        raise OperatorError(f"expected one reward, got {list(spec)}")
    function = named(name, rewards, "reward")
    return short(name), with_parameters(name, function, parameters or {})


def short(name: str) -> str:
    """Return what a reward is called in `rewards` and `scores`: its function's name.

    >>> short("my.rewards:lenient")
    'lenient'
    """
    return name.rpartition(":")[2]


def scored(
    function: Callable[..., Any],
    rows: Iterable[Row],
    *,
    at_once: int = 16,
    seconds: float = SECONDS,
) -> list[Judged]:
    """Return the reward of each row, with its reason or, when it is None, what went wrong.

    The rows are as for `tried`.
    """
    message = tried(function, rows, at_once=at_once, seconds=seconds)
    return [verdict if error is None else (None, error) for verdict, error in message]


def tried(
    function: Callable[..., Any],
    rows: Iterable[Row],
    *,
    at_once: int = 16,
    seconds: float = SECONDS,
) -> list[Tried]:
    """Return the reward of each row and its reason, and the error of one on which it raised.

    The rows are those of `experiences`, with what `score` says of their tasks. A judge of groups is
    given those with the same `group_id` together; its errors are those of the whole group.
    """
    given = list(rows)
    if looks_at(function) == "row":

        async def one(row: Row) -> Judged:
            return verdict(await said(function(task_of(row), Experience.from_row(row))))

        found: Any = answers(one, given, at_once=at_once, seconds=seconds)
        return [(_NONE if values is None else values, error) for values, error in found]

    async def group(places: list[int]) -> list[Tried]:
        tries = [Experience.from_row(given[i]) for i in places]
        return verdicts(await said(function(task_of(given[places[0]]), tries)), len(tries))

    units = places_by_group(row.get("group_id") for row in given)
    message: dict[int, Tried] = {}
    asked: Any = answers(group, units, at_once=at_once, seconds=seconds)
    for places, (values, error) in zip(units, asked, strict=True):
        message |= zip(places, values or [(_NONE, error)] * len(places), strict=True)
    return [message[i] for i in range(len(given))]


async def said(made: Any | Awaitable[Any]) -> Any:
    """Return what a reward function returned, waiting for it if it is `async`."""
    return await made if isawaitable(made) else made


def verdict(value: Any) -> Judged:
    """Return a reward and its reason; raises SchemaError for what is not a finite number."""
    detail = None
    if isinstance(value, Verdict):
        value, detail = value.value, proper(value.detail) if value.detail else value.detail
    if value is None:
        return None, detail
    number = float(value)
    if number - number != 0:
        raise SchemaError(f"the reward is {number}, expected a finite number or None")
    return number, detail


def verdicts(values: Any, number: int) -> list[Tried]:
    """Return the rewards of a group; raises SchemaError unless there is one for each try."""
    if not isinstance(values, Sequence) or len(cast(Sequence[Any], values)) != number:
        raise SchemaError(f"a judge of groups gave {values!r} for {number} tries, expected a list")
    return [(verdict(value), getattr(value, "error", None)) for value in values]


def task_of(row: Row) -> Task:
    """Return what a row tells of its task: its answer, conversation and metadata."""
    messages, metadata = row.get("task_messages"), row.get("task_metadata")
    return Task(
        messages=json.loads(messages) if messages else [],
        answer=row.get("answer"),
        metadata=json.loads(metadata) if metadata else None,
    )
