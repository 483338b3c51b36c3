"""Scoring stored rows: a reward function applied again, or for the first time."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import polars as pl
import pyarrow as pa

from ..store.errors import SchemaError
from ..store.records import Experience, Task
from . import rewards
from .body import Batches
from .decorator import operator
from .names import named

_COLUMNS = {
    "reward": pl.Float64,
    "scorer": pl.String,
    "scorer_version": pl.String,
    "detail": pl.String,
}


@operator(
    "derive", reads=("experience_id", "task_id", "answer"), reads_rest=True, writes=tuple(_COLUMNS)
)
def score(
    *, reward: str | Callable[..., Any] = "exact_match", scorer_version: str = "1"
) -> Batches:
    """Set `reward` by a reward function: one of ours by name, `package.module:function`, or itself.

    The rows need the task's `answer` beside the experience's columns (and `task_messages` or
    `task_metadata`, for a reward that reads them): `SELECT e.*, t.answer, t.messages AS
    task_messages FROM experiences e JOIN tasks t USING (task_id)`. A reward that is None, or not
    finite, or raises, is NULL; `detail` keeps what went wrong. `scorer` and `scorer_version` say
    who judged; raise the version when a function's meaning changes.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "task_id": "t", "answer": "4",
    ...                      "response_text": "4"})
    >>> rows.pipe(score(reward="exact_match")).select("reward", "scorer", "detail").rows()
    [(1.0, 'exact_match', None)]
    """
    function = named(reward, rewards, "reward") if isinstance(reward, str) else reward
    who = reward if isinstance(reward, str) else f"{reward.__module__}:{reward.__qualname__}"

    def judge(batch: pa.RecordBatch) -> pa.RecordBatch:
        verdicts = list(judged(function, batch.to_pylist()))
        return pa.record_batch(
            {
                "reward": pa.array([v for v, _ in verdicts], pa.float64()),
                "scorer": pa.array([who] * len(verdicts), pa.string()),
                "scorer_version": pa.array([scorer_version] * len(verdicts), pa.string()),
                "detail": pa.array([d for _, d in verdicts], pa.string()),
            }
        )

    return Batches(judge, columns=_COLUMNS)


def judged(
    function: Callable[..., Any], rows: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[float | None, str | None]]:
    """Yield the reward of each row and, when it is None, what went wrong, if anything did.

    The rows are those of `experiences`, with what `score` says of their tasks.
    """
    for row in rows:
        # the boundary of user code: a row that cannot be judged is a row with its error
        try:
            value = function(_task(row), Experience.from_row(row))
            yield _finite(value), None
        except Exception as error:  # noqa: BLE001
            yield None, f"{type(error).__name__}: {error}"


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if number - number != 0:
        raise SchemaError(f"the reward is {number}, expected a finite number or None")
    return number


def _task(row: Mapping[str, Any]) -> Task:
    messages, metadata = row.get("task_messages"), row.get("task_metadata")
    return Task(
        messages=json.loads(messages) if messages else [],
        answer=row.get("answer"),
        metadata=json.loads(metadata) if metadata else None,
    )
