"""Second tries: a failed one, with what was wrong with it, becomes a new task."""

from typing import Any, Literal

import polars as pl

from ..store.errors import OperatorError
from ..store.records import Message, Task
from . import derived_rows
from .body import Declared, Explained
from .decorator import operator
from .failed_step import FAILED, before_failure, failure_pattern

_TASK = pl.Schema(
    dict.fromkeys(
        ("task_id", "taskset", "split", "messages", "prompt_text", "answer", "metadata"), pl.String
    )
)
_MADE: dict[str, Any] = {**_TASK, "parent_id": pl.String()}
REFLECT = "That is not right.{feedback} Think about what went wrong, then try again."
"""What a failed try is answered with; `{feedback}` is the feedback, or nothing."""


@operator(
    "reshape", writes=(*_TASK, "parent_id"), links=("parent_id",), reads_all=True, scope="row"
)
def retry_tasks(
    *,
    start: Literal["reflect", "failed_step"] = "reflect",
    max_reward: float = 0.0,
    feedback: str | None = None,
    prompt: str = REFLECT,
    failed: str = FAILED,
    taskset: str = "retry",
) -> Declared:
    """Turn each failed try into a new task, for the sink `tasks`: try again, knowing what failed.

    With `reflect` the task is the whole failed try (as in Reflexion, arXiv:2303.11366), and
    `prompt` as a message of the user; `{feedback}` in it is the text in the column `feedback`, such
    as `detail` of a score, where there is one. With `failed_step` it is the try up to the step that
    failed (see `good_prefix`), to go on from there in another way. A try has failed when its reward
    is `max_reward` or less. The tasks have the old task's `answer`, a column that the rows need
    beside the experience's: `SELECT e.*, t.answer FROM experiences e JOIN tasks t USING (task_id)`.
    Their metadata names the try.

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

    def begun(row: derived_rows.ParentRow, talk: list[Message]) -> list[Message]:
        if start == "failed_step":
            return before_failure(talk, pattern)
        summary = row.get(feedback) if feedback else None
        said = prompt.format(feedback=f" {summary}" if summary else "")
        return [*talk, {"role": "user", "content": said}]

    def task_of(row: derived_rows.ParentRow) -> Task | str:
        talk = derived_rows.conversation(row)
        if why := _why_not(row["reward"], talk, max_reward):
            return why
        messages = begun(row, talk)
        if not messages:
            return "no failed step is found in it"
        return Task(
            messages=messages,
            answer=row["answer"],
            taskset=taskset,
            metadata={"parent_id": row["experience_id"], "task_id": row["task_id"]},
        )

    def make(rows: pl.DataFrame) -> pl.DataFrame:
        summary = [(task_of(row), row["experience_id"]) for row in rows.iter_rows(named=True)]
        tasks = [
            {**task.row(), "parent_id": name} for task, name in summary if isinstance(task, Task)
        ]
        return pl.DataFrame(tasks, schema=_MADE, orient="row")

    def explain(rows: pl.DataFrame) -> pl.DataFrame:
        why = [task_of(row) for row in rows.iter_rows(named=True)]
        reasons = [one if isinstance(one, str) else None for one in why]
        return rows.with_columns(pl.Series("reason", reasons, pl.String))

    body = Explained(
        lambda frame: frame.map_batches(make, schema=_MADE),
        reason=lambda frame: frame.map_batches(
            explain, schema={**frame.collect_schema(), "reason": pl.String()}
        ),
    )
    more = (feedback,) if feedback else ()
    return Declared(body=body, reads=(*derived_rows.READS, "reward", "answer", *more))


def _why_not(reward: float | None, talk: list[Message], max_reward: float) -> str | None:
    """Return why a try gives no task, whatever the task would begin with."""
    if reward is None:
        return "its reward is NULL"
    if reward > max_reward:
        return f"its reward is above {max_reward:g}"
    if not talk or talk[-1].get("role") == "user":
        return "it has no conversation that ends with a reply"
    return None
