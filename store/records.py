"""Task and Experience: one row each, as frozen values for workflows and rewards."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Self

from .conversation import CONVERSATION, is_conversation, last_question
from .errors import SchemaError, shorten
from .ids import content_id

Message = dict[str, Any]
"""One message of a conversation in the chat format: role, content, and tool calls if any."""


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


_spelled = json.JSONEncoder(ensure_ascii=False).encode
"""As `json.dumps`, which makes an encoder at each call."""


def _json(value: object) -> str | None:
    return None if value is None else _spelled(value)


def _pairs(values: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    return [{"name": k, "value": v} for k, v in values.items()] or None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: a conversation to continue, and the reference answer."""

    messages: Sequence[Message]
    """The conversation so far."""
    answer: str | None = None
    """The reference answer."""
    taskset: str = "default"
    split: str = "train"
    workflow: str | None = None
    metadata: Mapping[str, Any] | None = None

    @classmethod
    def ask(cls, prompt: str, answer: str | None = None, **rest: Any) -> Self:
        """Make a task of one user message.

        >>> Task.ask("2+2=", "4").prompt_text
        '2+2='
        """
        return cls(messages=[{"role": "user", "content": prompt}], answer=answer, **rest)

    @cached_property
    def task_id(self) -> str:
        """Hash of the content: two tasks with the same content are one task."""
        parts = (self.taskset, self.split, list(self.messages), self.answer, self.workflow)
        return content_id(*parts, dict(self.metadata) if self.metadata else None)

    @property
    def prompt_text(self) -> str | None:
        """The last user message as plain text."""
        return last_question(self.messages)

    def row(self) -> dict[str, Any]:
        """Return the row of `tasks`, without what the store fills in."""
        return {
            "task_id": self.task_id,
            "taskset": self.taskset,
            "split": self.split,
            "messages": json.dumps(list(self.messages), ensure_ascii=False),
            "prompt_text": self.prompt_text,
            "answer": self.answer,
            "workflow": self.workflow,
            "metadata": _json(dict(self.metadata) if self.metadata else None),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Rebuild the task from its row."""
        return cls(
            messages=json.loads(row["messages"]),
            answer=row.get("answer"),
            taskset=row["taskset"],
            split=row["split"],
            workflow=row.get("workflow"),
            metadata=json.loads(row["metadata"]) if row.get("metadata") else None,
        )


@dataclass(frozen=True, kw_only=True)
class Experience:
    """One trainable token sequence. Every per-token sequence is as long as token_ids.

    What a workflow returns; the explorer stamps ids, run, batch and time.
    """

    task_id: str
    token_ids: Sequence[int] | None = None
    tokenizer: str | None = None
    loss_mask: Sequence[bool] | None = None
    logprobs: Sequence[float] | None = None
    prompt_length: int | None = None
    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    prompt_text: str | None = None
    response_text: str | None = None
    finish_reason: str | None = None
    drop_reason: str | None = None
    policy_version: int | None = None
    segments: Sequence[Mapping[str, int]] | None = None
    digests: Sequence[str | None] | None = None
    engine: str | None = None
    session_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    sampling: Mapping[str, Any] | None = None
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    token_rewards: Sequence[float] | None = None
    advantage: float | None = None
    priority: float | None = None
    teacher_logprobs: Sequence[float] | None = None
    routed_experts: Sequence[Sequence[int]] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None
    num_turns: int | None = None
    source: str = "explorer"
    parent_id: str | None = None
    experience_id: str | None = None
    group_id: str | None = None
    rollout_index: int = 0
    run_id: str | None = None
    batch: int | None = None
    group_index: int | None = None
    purpose: str = "train"

    def with_reward(self, rewards: Mapping[str, float | None]) -> Self:
        """Return a copy whose reward is the sum of the parts, or NULL when a part is missing."""
        values = list(rewards.values())
        # a part that could not be computed is not 0, so the sum is not known either
        total = None if not values or None in values else sum(v for v in values if v is not None)
        return self.updated(rewards=dict(rewards), reward=total)

    def updated(self, **columns: Any) -> Self:
        """Return a copy with other values in some columns, faster than `dataclasses.replace`."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **columns)
        return copy

    def row(self) -> dict[str, Any]:
        """Return the row of `experiences`, without what the store fills in."""
        # a `cached_property` of this class would become a column
        row = dict(vars(self))
        for name in _AS_JSON:
            row[name] = _json(row[name])
        for name in _AS_PAIRS:
            row[name] = _pairs(row[name])
        row["num_tokens"] = None if self.token_ids is None else len(self.token_ids)
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Rebuild the experience from its row; columns that are missing stay at their defaults."""
        names = {f.name for f in fields(cls)}
        # A NULL in the store means that nothing was said, and so the default of the field holds.
        values = {k: v for k, v in row.items() if k in names and v is not None}
        for name in _AS_JSON:
            if name in values:
                values[name] = json.loads(values[name])
        for name in _AS_PAIRS:
            if name in values:
                values[name] = {p["name"]: p["value"] for p in values[name]}
        return cls(**values)


_AS_JSON = ("messages", "tools", "metadata", "sampling")
_AS_PAIRS = ("rewards", "metrics", "timings")
Record = Task | Experience
"""A record that converts to a row."""


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the rows of records.

    Raises SchemaError for an experience without an id, and for messages that are no conversation.
    """
    given = list(records)
    for record in given:
        _check(record)
    return [record.row() for record in given]


def columns_of(experiences: Sequence[Experience]) -> dict[str, list[Any]]:
    """Return the rows of experiences as columns, without those that are NULL in all of them.

    The values are those of `rows_of`, in a third of its time: most columns are only gathered.
    """
    for one in experiences:
        _check(one)
    rows = [vars(one) for one in experiences]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["num_tokens"] = [ids if ids is None else len(ids) for ids in columns["token_ids"]]
    changed = {**dict.fromkeys(_AS_JSON, _json), **dict.fromkeys(_AS_PAIRS, _pairs)}
    for name, change in changed.items():
        columns[name] = [*map(change, columns[name])]
    # by type: `!=` on a value that is an array has no truth value
    return {n: values for n, values in columns.items() if {*map(type, values)} != {type(None)}}


def _check(record: Record) -> None:
    if record.messages is not None and not is_conversation(record.messages):
        raise SchemaError(
            f"`messages` must be {CONVERSATION}, got {shorten(repr(record.messages), 60)}"
        )
    if isinstance(record, Experience) and (record.experience_id is None or record.group_id is None):
        raise SchemaError(
            "an experience has no `experience_id` or `group_id`, expected both; "
            "set them, or let the explorer or `rlake import` do it"
        )


def proper(text: str) -> str:
    """Return a text that can be encoded: a lone surrogate, which JSON may contain, becomes `?`.

    >>> proper("so\\ud83d")
    'so?'
    """
    return text.encode("utf-8", "replace").decode()
