"""Pairs of a better and a worse answer, in TRL's two shapes and OpenAI's."""

import json
from collections.abc import Sequence

from ...conversation import shared, why_no_pair
from ...raw_json import elements, listed, members
from .format import LEFT_OUT, Format, Ours, Row, message, messages, others, short, wrong

_USED = ("prompt", "chosen", "rejected", "tools", "score_chosen", "score_rejected", "margin",
         "input", "preferred_output", "non_preferred_output")  # fmt: skip

Messages = Sequence[str]
"""The text of each message."""
Parts = tuple[Messages, Messages, Messages]
"""The prompt, the better answer, the worse one."""


def pair(row: Row) -> list[Ours]:
    """Return the better answer, then the worse one, each after the shared prompt."""
    tools = row.json("tools")
    if "preferred_output" in row:
        asked, good, bad, tools = _openai(row)
    else:
        asked, good, bad = _trl(row)
    if not asked:
        raise wrong(
            "`chosen` and `rejected` must be two answers to one prompt; give it as `prompt`, or "
            f"begin both with it, got {short(row.get('chosen'))} and {short(row.get('rejected'))}"
        )
    conversations = ([*map(json.loads, [*asked, *answer])] for answer in (good, bad))
    if (why_not := why_no_pair(*conversations)) is not None:
        return [{LEFT_OUT: why_not}]
    shared: Ours = {
        "num_asked": len(asked),
        "tools": tools,
        "margin": row.number("margin"),
        "metadata": others(row, _USED),
    }
    return [
        {"messages": listed([*asked, *answer]), "reward": row.number(score), **shared}
        for answer, score in ((good, "score_chosen"), (bad, "score_rejected"))
    ]


def _trl(row: Row) -> Parts:
    good, bad = row.get("chosen"), row.get("rejected")
    if good is None or bad is None:
        raise wrong("a pair needs `chosen` and `rejected`")
    is_text = isinstance(good, str) and good.lstrip()[:2] not in ("[{", "[ ")
    if isinstance(good, str) != isinstance(bad, str):
        raise wrong(f"`chosen` and `rejected` differ in shape: {short(good)} and {short(bad)}")
    if is_text:
        return _of_text(row, good, bad)
    conversations = row.messages("chosen") or [], row.messages("rejected") or []
    if all(json.loads(c[0])["role"] == "assistant" for c in conversations):
        return row.turns("prompt", "user"), *conversations
    return _split(*conversations)


def _of_text(row: Row, good: str, bad: str) -> Parts:
    asked = row.turns("prompt", "user")
    if not asked:  # TRL's implicit prompt: the common prefix, without a trailing space
        same = shared(good, bad)
        same -= good[same - 1 : same] == " "
        asked = [message("user", good[:same])] if same > 0 else []
        good, bad = good[same:], bad[same:]
    return asked, [message("assistant", good)], [message("assistant", bad)]


def _split(good: Messages, bad: Messages) -> Parts:
    """Split prompt and answers: the prompt is the common prefix of both conversations."""
    same = shared([*map(json.loads, good)], [*map(json.loads, bad)])
    return good[:same], good[same:], bad[same:]


def _openai(row: Row) -> tuple[Messages, Messages, Messages, str | None]:
    parts = members(row.json("input") or "{}")
    asked = messages(parts.get("messages", "null"), "input.messages")
    good, bad = (
        elements(row.json(name) or "[]") for name in ("preferred_output", "non_preferred_output")
    )
    tools = parts.get("tools")
    return asked, good, bad, None if tools in (None, "[]", "null") else tools


PREFERENCES = Format(
    "preferences",
    '{"prompt", "chosen", "rejected"}, text or messages, as TRL has them',
    needs=(frozenset({"chosen", "rejected"}), frozenset({"preferred_output", "input"})),
    columns=("messages", "num_asked", "tools", "margin", "reward", "metadata"),
    rows=pair,
    is_pairs=True,
)
