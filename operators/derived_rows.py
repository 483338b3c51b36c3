"""Rows made from others: what a new row keeps of its parent, and what it cannot have."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import polars as pl

from ..store.records import Message
from .async_map import answers
from .body import ERROR
from .invariants import id_column

ParentRow = dict[str, Any]
Made = Mapping[str, Any] | None
"""The columns in which a new row differs from its parent; None: no row is made."""

READS = ("experience_id", "task_id", "messages", "prompt_text", "response_text")
"""Columns that a conversation and its names are read from."""

_OWN = ("group_id", "run_id", "step", "created_at", "advantage", "priority")
_OF_TOKENS = (
    "policy_version",
    "segments",
    "token_ids",
    "tokenizer",
    "loss_mask",
    "logprobs",
    "prompt_length",
    "num_tokens",
    "token_rewards",
    "teacher_logprobs",
    "finish_reason",
)
_JUDGED = ("reward", "rewards", "metrics")


def new_rows(
    frame: pl.LazyFrame,
    make: Callable[[ParentRow], Made | Awaitable[Made]],
    *,
    at_once: int = 16,
    seconds: float = 60.0,
) -> pl.LazyFrame:
    """Return the new rows that `make`, plain or `async`, makes of single rows.

    A new row is its parent's copy with the columns that `make` returns. What it raises is the error
    of that row alone.
    """
    schema = {**frame.collect_schema(), "parent_id": pl.String(), ERROR: pl.String()}
    key = id_column(list(schema))

    def made(rows: pl.DataFrame) -> pl.DataFrame:
        message = answers(make, rows.iter_rows(named=True), at_once=at_once, seconds=seconds)
        found = []
        for row, (changes, error) in zip(rows.iter_rows(named=True), message, strict=True):
            if error is not None:
                found.append({key: row[key], "parent_id": row[key], ERROR: error})
            elif changes is not None:
                own = dict.fromkeys((key, *_OWN))
                found.append({**row, **own, "parent_id": row[key], **changes})
        full = [{name: one.get(name) for name in schema} for one in found]
        return pl.DataFrame(full, schema=schema, orient="row")

    return frame.map_batches(made, schema=schema)


def retold(messages: Sequence[Message], *, source: str, reward: float | None) -> ParentRow:
    """Return the columns of a row whose text is another than its parent's.

    Its tokens are not those that any policy sampled, so all columns of tokens are NULL; what was
    judged of the old text is not kept.
    """
    return {
        **dict.fromkeys(_OF_TOKENS + _JUDGED),
        **texts(messages),
        "reward": reward,
        "source": source,
        "rollout": 0,
        "drop_reason": None,
    }


def texts(messages: Sequence[Message]) -> ParentRow:
    """Return the columns that tell a conversation as text."""
    asked = [m for m in messages[:-1] if m.get("role") == "user"]
    return {
        "messages": json.dumps(list(messages), ensure_ascii=False),
        "prompt_text": _content(asked[-1]) if asked else None,
        "response_text": _content(messages[-1]),
        "num_turns": sum(m.get("role") == "assistant" for m in messages),
    }


def conversation(row: Mapping[str, Any]) -> list[Message]:
    """Return a row's conversation, from its texts where it has no messages; empty without any.

    >>> conversation({"prompt_text": "2+2=", "response_text": "4"})[1]
    {'role': 'assistant', 'content': '4'}
    """
    if row.get("messages"):
        return json.loads(row["messages"])
    prompt, reply = row.get("prompt_text"), row.get("response_text")
    if prompt is None or reply is None:
        return []
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]


def question(row: Mapping[str, Any], talk: Sequence[Message]) -> list[Message]:
    """Return what a conversation began with: its task's messages, or all before the first reply."""
    if row.get("task_messages"):
        return json.loads(row["task_messages"])
    first = next((i for i, m in enumerate(talk) if m.get("role") == "assistant"), len(talk))
    return list(talk[:first])


def _content(message: Message) -> str | None:
    content = message.get("content")
    return content if isinstance(content, str) else None
