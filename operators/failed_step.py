"""Failed steps of rollouts with several turns, and the good steps before them."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ..store.errors import OperatorError
from ..store.records import Message
from ..store.schema import PER_TOKEN
from . import derived_rows
from .body import FrameFunction
from .decorator import operator

FAILED = r"(?i)^\s*(error|exception|traceback|fail|time(d )?out|invalid)"
"""How the reply of a tool or an environment begins if the step before it failed."""


@operator("augment", reads=derived_rows.READS, reads_all=True, scope="row")
def good_prefix(*, failed: str = FAILED) -> FrameFunction:
    """Add each rollout of several turns again, up to the step before the one that failed.

    The failed step is the first reply whose result, the tool or user message after it, matches the
    regular expression `failed`. The new row ends with the last reply before that step; a rollout
    without a failed step, or without a reply before it, gives none. Its source is `synthetic`, and
    its reward is NULL, since it was not judged. Its tokens are the first of its parent's, as
    sampled, with all token columns; they are NULL if the tokens cannot be split by turns.

    >>> import polars as pl
    >>> import json
    >>> turns = [("user", "go"), ("assistant", "look"), ("tool", "a door"), ("assistant", "fly"),
    ...         ("tool", "Error: you cannot")]
    >>> chat = json.dumps([{"role": r, "content": c} for r, c in turns])
    >>> rows = pl.DataFrame({"experience_id": ["a"], "task_id": "t", "messages": chat,
    ...                      "prompt_text": "go", "response_text": "fly"})
    >>> rows.pipe(good_prefix()).select("parent_id", "response_text").row(1)
    ('a', 'look')
    """
    pattern = failure_pattern(failed)

    def cut(row: derived_rows.ParentRow) -> derived_rows.Made:
        conversation = derived_rows.conversation(row)
        kept = before_failure(conversation, pattern)
        while kept and kept[-1].get("role") != "assistant":
            kept = kept[:-1]
        if not kept:
            return None
        texts = derived_rows.retold(kept, source="synthetic", reward=None)
        return {**texts, **_first_tokens(row, conversation, kept)}

    return lambda frame: derived_rows.new_rows(frame, cut)


def failure_pattern(failed: str) -> re.Pattern[str]:
    """Return a regular expression; raises OperatorError when it does not parse."""
    try:
        return re.compile(failed)
    except re.error as error:
        raise OperatorError(f"`failed` {failed!r} does not parse: {error}") from error


def before_failure(conversation: Sequence[Message], pattern: re.Pattern[str]) -> list[Message]:
    """Return the messages before the first failed reply; empty if none failed."""
    reply: int | None = None
    for i, message in enumerate(conversation):
        if message.get("role") == "assistant":
            reply = i
        elif reply is not None and pattern.search(str(message.get("content") or "")):
            return list(conversation[:reply])
    return []


def _first_tokens(
    row: Mapping[str, Any], conversation: Sequence[Message], kept: Sequence[Message]
) -> derived_rows.ParentRow:
    """Return the token columns up to the end of the last reply that is kept."""
    tokens, mask = row.get("token_ids"), row.get("loss_mask")
    if tokens is None or mask is None or len(mask) != len(tokens):
        return {}
    ends, place = [], 0
    for is_sampled, run in groupby(mask):
        place += len(list(run))
        ends += [place] if is_sampled else []
    num_replies = sum(m.get("role") == "assistant" for m in conversation)
    # replies that the task itself began with were not sampled
    given = num_replies - len(ends)
    left = sum(m.get("role") == "assistant" for m in kept) - given
    if left < 1 or (given and row.get("num_turns") != len(ends)):
        return {}
    end = ends[left - 1]
    parts = {n: row[n][:end] for n in ("token_ids", *PER_TOKEN) if row.get(n) is not None}
    same = {n: row.get(n) for n in ("policy_version", "prompt_length", "tokenizer")}
    segments = _first_segments(row.get("segments"), sum(mask[:end]))
    return {**parts, **same, "segments": segments, "num_tokens": end}


def _first_segments(segments: Sequence[Mapping[str, int]] | None, num_sampled: int) -> Any:
    if segments is None:
        return None
    kept = []
    for segment in segments:
        size = min(segment["num_tokens"], num_sampled)
        kept += [{**segment, "num_tokens": size}] if size else []
        num_sampled -= size
    return kept
