"""New rows derived from others: which columns they copy from their parent."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import polars as pl

from ..store.records import Message
from .body import ERROR
from .concurrency import answers
from .invariants import id_column

ParentRow = dict[str, Any]
Made = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""The columns in which a new row (or each of several) differs from its parent; None: no row."""

READS = ("experience_id", "task_id", "messages", "prompt_text", "response_text")
"""Columns that a conversation and its ids are read from."""

_OWN = ("group_id", "run_id", "batch", "group_index", "created_at", "advantage", "priority")
_OF_THE_OLD_TEXT = (
    *("policy_version", "segments", "token_ids", "tokenizer", "loss_mask", "logprobs"),
    *("prompt_length", "num_tokens", "token_rewards", "teacher_logprobs", "finish_reason"),
    *("routed_experts", "reward", "rewards", "metrics", "drop_reason"),
)
NEW_TEXT: ParentRow = {**dict.fromkeys(_OF_THE_OLD_TEXT), "source": "synthetic", "rollout_index": 0}
"""Columns of a row whose text differs from its parent's.

No policy sampled this text, so all token columns are NULL; rewards and metrics of the old text are
removed.
"""


def new_rows(
    frame: pl.LazyFrame,
    make: Callable[[ParentRow], Made | Awaitable[Made]],
    *,
    max_concurrency: int = 16,
    timeout: float = 60.0,
) -> pl.LazyFrame:
    """Return the new rows that `make`, plain or `async`, derives from single rows.

    A new row is a copy of its parent with the columns that `make` returns. An exception is an error
    of that row alone.
    """
    schema = {**frame.collect_schema(), "parent_id": pl.String(), ERROR: pl.String()}
    key = id_column(list(schema))

    def made(rows: pl.DataFrame) -> pl.DataFrame:
        given = rows.to_dicts()
        made_of = answers(make, given, max_concurrency=max_concurrency, timeout=timeout)
        found, own = [], dict.fromkeys((key, *_OWN))
        for row, (changes, error) in zip(given, made_of, strict=True):
            if error is not None:
                # A row that was not made has no id of its own, so its error is
                # noted under its parent's.
                found.append({key: row[key], "parent_id": row[key], ERROR: error})
            several = [changes] if isinstance(changes, Mapping) else changes or ()
            found += [{**row, **own, "parent_id": row[key], **one} for one in several]
        full = [{name: one.get(name) for name in schema} for one in found]
        return pl.DataFrame(full, schema=schema, orient="row")

    return frame.map_batches(made, schema=schema)


def retold(messages: Sequence[Message], *, source: str, reward: float | None) -> ParentRow:
    """Return the columns of a row with another conversation than its parent's."""
    asked = [m for m in messages[:-1] if m.get("role") == "user"]
    return {
        **NEW_TEXT,
        "messages": json.dumps(list(messages), ensure_ascii=False),
        "prompt_text": _content(asked[-1]) if asked else None,
        "response_text": _content(messages[-1]),
        "num_turns": sum(m.get("role") == "assistant" for m in messages),
        "reward": reward,
        "source": source,
    }


def conversation(row: Mapping[str, Any]) -> list[Message]:
    """Return a row's conversation, from its texts if it has no messages; empty if it has neither.

    >>> conversation({"prompt_text": "2+2=", "response_text": "4"})[1]
    {'role': 'assistant', 'content': '4'}
    """
    if row.get("messages"):
        return json.loads(row["messages"])
    prompt, reply = row.get("prompt_text"), row.get("response_text")
    if prompt is None or reply is None:
        return []
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]


def question(row: Mapping[str, Any], messages: Sequence[Message]) -> list[Message]:
    """Return the first messages of a conversation: the task's, or all before the first reply."""
    if row.get("task_messages"):
        return json.loads(row["task_messages"])
    first = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), len(messages))
    return list(messages[:first])


def _content(message: Message) -> str | None:
    content = message.get("content")
    return content if isinstance(content, str) else None
