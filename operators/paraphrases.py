"""Paraphrase: what a policy says in other words becomes a new row."""

import json
from typing import Any, Literal

from ..store.records import Message, Task
from . import derived_rows
from .body import FrameFunction
from .chat_client import chat_client
from .decorator import operator

PROMPT = (
    "Say the following in other words. Keep its meaning, all numbers and all names, and its "
    "language. Answer with the new text alone.\n\n{text}"
)
"""What is asked; `{text}` is the text."""


@operator("augment", reads=("task_id", "messages", "prompt_text"), reads_all=True, scope="row")
def paraphrase(
    *,
    policy: str | dict[str, Any],
    what: Literal["prompt", "reply"] = "prompt",
    prompt: str = PROMPT,
    at_once: int = 8,
    seconds: float = 60.0,
) -> FrameFunction:
    """Add each try or task again with its question, or last reply, in a policy's other words.

    `policy` answers: an async function of messages, as `package.module:function`, or an endpoint
    (`{url: ..., model: ...}`). A new try is `synthetic`, without tokens and without a reward: the
    other words were not judged; with another question it is of another task. A new task, of rows
    of `tasks`, has the old one's answer, and names it in its metadata. Words that did not change
    give no row; a request that fails is that row's error.

    >>> import polars as pl
    >>> rows = pl.DataFrame({"experience_id": ["a"], "task_id": "t", "messages": None,
    ...                      "prompt_text": "2+2=", "response_text": "4"},
    ...                     schema_overrides={"messages": pl.String})
    >>> op = paraphrase(policy="rlake.operators.paraphrases:echo", prompt="What is {text}")
    >>> rows.pipe(op).select("prompt_text", "response_text").row(1)
    ('What is 2+2=', '4')
    """
    ask = chat_client(policy)
    role = "user" if what == "prompt" else "assistant"

    async def again(row: derived_rows.ParentRow) -> derived_rows.Made:
        talk = derived_rows.conversation(row)
        place = _last(talk, role)
        old = None if place is None else talk[place].get("content")
        if place is None or not isinstance(old, str) or not old.strip():
            return None
        said = await ask([{"role": "user", "content": prompt.replace("{text}", old)}])
        if said.strip() in ("", old.strip()):
            return None
        talk[place] = {**talk[place], "content": said.strip()}
        if "experience_id" not in row:
            return _new_task(row, talk, said.strip())
        message = derived_rows.retold(talk, source="synthetic", reward=None)
        return message | ({"task_id": _task(row, talk).task_id} if what == "prompt" else {})

    return lambda frame: derived_rows.new_rows(frame, again, at_once=at_once, seconds=seconds)


async def echo(messages: list[Message]) -> str:
    """Answer with the last message: a policy for trying things out."""
    return str(messages[-1]["content"])


def _new_task(
    row: derived_rows.ParentRow, talk: list[Message], prompt_text: str
) -> derived_rows.Made:
    metadata = {**json.loads(row.get("metadata") or "{}"), "paraphrase_of": row["task_id"]}
    return {
        "messages": json.dumps(talk, ensure_ascii=False),
        "prompt_text": prompt_text,
        "metadata": json.dumps(metadata, ensure_ascii=False),
    }


def _last(talk: list[Message], role: str) -> int | None:
    places = [i for i, m in enumerate(talk) if m.get("role") == role]
    return places[-1] if places else None


def _task(row: derived_rows.ParentRow, talk: list[Message]) -> Task:
    asked = derived_rows.question({**row, "task_messages": None}, talk)
    return Task(messages=asked, answer=row.get("answer"), taskset="paraphrase")
