"""Tasks of asking the right question, from logs of experts who converse with people."""

import polars as pl

from ..store.records import Message, Task
from . import derived_rows
from .body import Declared, Explained, on_all_rows
from .decorator import operator

_TASK = ("task_id", "taskset", "split", "messages", "prompt_text", "answer", "metadata")
_MADE: dict[str, pl.DataType] = dict.fromkeys((*_TASK, "parent_id"), pl.String())
STOP = "<stop />"
"""What is said in place of a further question."""


@operator("reshape", writes=tuple(_MADE), links=("parent_id",), reads_all=True, scope="row")
def question_tasks(*, stop: str = STOP, taskset: str = "ask") -> Declared:
    """Turn each logged conversation into tasks of what to ask next, for the sink `tasks`.

    As in Learn-to-Ask (arXiv:2510.25441): at each reply of the expert (role assistant), the task is
    the conversation before it, and what comes later tells what was worth asking. The task's
    metadata have `ask`: `decision`, which is `stop` where the user says nothing more, and else
    `continue`; and `information`, the rest of the conversation. Its answer is the expert's reply,
    or `stop`. Messages of one role that follow each other are joined. The workflow `learn_to_ask`
    rewards what a policy asks.

    >>> log = [{"role": "user", "content": "I cough."},
    ...         {"role": "assistant", "content": "Since when?"},
    ...         {"role": "user", "content": "Two days."},
    ...         {"role": "assistant", "content": "Take syrup."}]
    >>> import json
    >>> rows = pl.DataFrame({"experience_id": ["a"], "task_id": "t", "prompt_text": None,
    ...                      "response_text": None, "messages": json.dumps(log)})
    >>> rows.pipe(question_tasks()).select("prompt_text", "answer").rows()
    [('I cough.', 'Since when?'), ('Two days.', '<stop />')]
    """

    def tasks_of(row: derived_rows.ParentRow) -> list[Task]:
        log = _joined(derived_rows.conversation(row))
        at = [i for i, message in enumerate(log) if message["role"] == "assistant" and i]
        return [_task(log, i, row, stop, taskset) for i in at if log[i - 1]["role"] == "user"]

    def make(rows: pl.DataFrame) -> pl.DataFrame:
        made = [
            {**task.row(), "parent_id": row["experience_id"]}
            for row in rows.iter_rows(named=True)
            for task in tasks_of(row)
        ]
        return pl.DataFrame(made, schema=_MADE, orient="row")

    def explain(rows: pl.DataFrame) -> pl.DataFrame:
        why = "no user is answered in it"
        reasons = [None if tasks_of(row) else why for row in rows.iter_rows(named=True)]
        return rows.with_columns(pl.Series("reason", reasons, pl.String))

    body = Explained(
        lambda frame: frame.map_batches(make, schema=_MADE),
        reason=on_all_rows(explain, {"reason": pl.String}),
    )
    return Declared(body=body, reads=derived_rows.READS)


def _task(
    log: list[Message], at: int, row: derived_rows.ParentRow, stop: str, taskset: str
) -> Task:
    # what the expert says after the user's last words finds nothing out
    is_over = not any(message["role"] == "user" for message in log[at:])
    later = "\n".join(f"{message['role']}: {message['content']}" for message in log[at:])
    about = {"decision": "stop" if is_over else "continue", "information": "" if is_over else later}
    return Task(
        messages=log[:at],
        answer=stop if is_over else str(log[at]["content"]),
        taskset=taskset,
        metadata={"ask": about, "parent_id": row["experience_id"]},
    )


def _joined(messages: list[Message]) -> list[Message]:
    """Return messages of text, those of one role that follow each other as one."""
    made: list[Message] = []
    for message in messages:
        text = message.get("content")
        if not isinstance(text, str) or message.get("role") not in ("system", "user", "assistant"):
            continue
        if made and made[-1]["role"] == message["role"]:
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n{text}"}
        else:
            made.append({"role": message["role"], "content": text})
    return made
