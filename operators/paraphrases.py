"""Paraphrase questions or replies with a model, as new rows."""

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
"""The prompt; `{text}` is the text to paraphrase."""


@operator("augment", reads=("task_id", "messages", "prompt_text"), reads_all=True, scope="row")
def paraphrase(
    *,
    policy: str | dict[str, Any],
    what: Literal["prompt", "reply"] = "prompt",
    prompt: str = PROMPT,
    max_concurrency: int = 8,
    timeout: float = 60.0,
) -> FrameFunction:
    """Add each rollout or task again, with its question or last reply paraphrased by a model.

    `policy` is an async function of messages, as `package.module:function`, or an endpoint (`{url:
    ..., model: ...}`). The source of a new rollout is `synthetic`; it has no tokens and no reward,
    since the new words were not judged, and with a new question it belongs to a new task. A new
    task, from rows of `tasks`, has the old one's answer, and refers to it in its metadata. An
    unchanged text gives no row; a request that fails is an error of that row.

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
        conversation = derived_rows.conversation(row)
        place = _last(conversation, role)
        old = None if place is None else conversation[place].get("content")
        if place is None or not isinstance(old, str) or not old.strip():
            return None
        said = await ask([{"role": "user", "content": prompt.replace("{text}", old)}])
        if said.strip() in ("", old.strip()):
            return None
        conversation[place] = {**conversation[place], "content": said.strip()}
        if "experience_id" not in row:
            return _new_task(row, conversation, said.strip())
        new = derived_rows.retold(conversation, source="synthetic", reward=None)
        return new | ({"task_id": _task(row, conversation).task_id} if what == "prompt" else {})

    return lambda frame: derived_rows.new_rows(
        frame, again, max_concurrency=max_concurrency, timeout=timeout
    )


async def echo(messages: list[Message]) -> str:
    """Answer with the last message: a policy for trying things out."""
    return str(messages[-1]["content"])


def _new_task(
    row: derived_rows.ParentRow, conversation: list[Message], prompt_text: str
) -> derived_rows.Made:
    metadata = {**json.loads(row.get("metadata") or "{}"), "paraphrase_of": row["task_id"]}
    return {
        "messages": json.dumps(conversation, ensure_ascii=False),
        "prompt_text": prompt_text,
        "metadata": json.dumps(metadata, ensure_ascii=False),
    }


def _last(conversation: list[Message], role: str) -> int | None:
    places = [i for i, m in enumerate(conversation) if m.get("role") == role]
    return places[-1] if places else None


def _task(row: derived_rows.ParentRow, conversation: list[Message]) -> Task:
    asked = derived_rows.question({**row, "task_messages": None}, conversation)
    return Task(messages=asked, answer=row.get("answer"), taskset="paraphrase")
