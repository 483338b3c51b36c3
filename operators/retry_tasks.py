"""Retry tasks: a failed rollout, with feedback, becomes a new task."""

from typing import Literal

import polars as pl

from ..store.errors import OperatorError
from ..store.records import Message, Task
from . import derived_rows
from .body import Declared, Explained, on_all_rows
from .decorator import operator
from .failed_step import FAILED, before_failure, failure_pattern

_TASK = ("task_id", "taskset", "split", "messages", "prompt_text", "answer", "metadata")
_MADE: dict[str, pl.DataType] = dict.fromkeys((*_TASK, "parent_id"), pl.String())
REFLECT = "That is not right.{feedback} Think about what went wrong, then try again."
"""The message after a failed rollout; `{feedback}` is the feedback, or nothing."""


@operator("reshape", writes=tuple(_MADE), links=("parent_id",), reads_all=True, scope="row")
def retry_tasks(
    *,
    start: Literal["reflect", "failed_step"] = "reflect",
    max_reward: float = 0.0,
    feedback: str | None = None,
    prompt: str = REFLECT,
    failed: str = FAILED,
    taskset: str = "retry",
) -> Declared:
    """Turn each failed rollout into a new task, for the sink `tasks`.

    With `reflect`, the task is the whole failed rollout (as in Reflexion, arXiv:2303.11366)
    followed by `prompt` as a user message, in which `{feedback}` is the text in the column
    `feedback`, such as `detail` of a score, if there is one. With `failed_step`, it is the rollout
    up to the step that failed (see `good_prefix`), to be continued differently. A rollout failed if
    its reward is at most `max_reward`. The tasks have the old task's `answer`, a column that the
    rows need in addition to the experience's: `SELECT e.*, t.answer FROM experiences e JOIN tasks t
    USING (task_id)`. Their metadata refers to the rollout.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "task_id": "t", "reward": [0.0, 1.0],
    ...     "messages": None, "prompt_text": "2+2=", "response_text": ["5", "4"], "answer": "4"},
    ...     schema_overrides={"messages": pl.String})
    >>> applied = retry_tasks(prompt="No. Again.").apply(rows)
    >>> applied.rows.select("prompt_text", "answer", "parent_id").rows(), applied.dropped.rows()
    ([('No. Again.', '4', 'a')], [('b', 'its reward is above 0')])
    """
    try:
        prompt.format(feedback="")
    except (KeyError, IndexError, ValueError) as error:
        raise OperatorError(
            f"`prompt` may hold `{{feedback}}` and nothing else: {error}"
        ) from error
    pattern = failure_pattern(failed)

    def task_of(row: derived_rows.ParentRow) -> Task | str:
        conversation = derived_rows.conversation(row)
        if why := _why_not(row["reward"], conversation, max_reward):
            return why
        if start == "failed_step":
            messages = before_failure(conversation, pattern)
        else:
            text = row.get(feedback) if feedback else None
            asked = prompt.format(feedback=f" {text}" if text else "")
            messages = [*conversation, {"role": "user", "content": asked}]
        if not messages:
            return "no failed step is found in it"
        return Task(
            messages=messages,
            answer=row["answer"],
            taskset=taskset,
            metadata={"parent_id": row["experience_id"], "task_id": row["task_id"]},
        )

    def make(rows: pl.DataFrame) -> pl.DataFrame:
        made = [(task_of(row), row["experience_id"]) for row in rows.iter_rows(named=True)]
        tasks = [{**one.row(), "parent_id": name} for one, name in made if isinstance(one, Task)]
        return pl.DataFrame(tasks, schema=_MADE, orient="row")

    def explain(rows: pl.DataFrame) -> pl.DataFrame:
        made = [task_of(row) for row in rows.iter_rows(named=True)]
        reasons = [one if isinstance(one, str) else None for one in made]
        return rows.with_columns(pl.Series("reason", reasons, pl.String))

    body = Explained(
        lambda frame: frame.map_batches(make, schema=_MADE),
        reason=on_all_rows(explain, {"reason": pl.String}),
    )
    more = (feedback,) if feedback else ()
    return Declared(body=body, reads=(*derived_rows.READS, "reward", "answer", *more))


def _why_not(reward: float | None, conversation: list[Message], max_reward: float) -> str | None:
    """Return why a rollout gives no task; None if it does."""
    if reward is None:
        return "its reward is NULL"
    if reward > max_reward:
        return f"its reward is above {max_reward:g}"
    if not conversation or conversation[-1].get("role") == "user":
        return "it has no conversation that ends with a reply"
    return None
