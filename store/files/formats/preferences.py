"""Pairs of a better and a worse answer: TRL's two shapes, and OpenAI's."""

import json
from collections.abc import Sequence

from ...conversation import shared, why_no_pair
from ..raw_json import elements, listed, members
from .format import LEFT_OUT, Format, Ours, Row, message, messages, others, short, wrong

_USED = ("prompt", "chosen", "rejected", "tools", "score_chosen", "score_rejected", "margin",
         "input", "preferred_output", "non_preferred_output")  # fmt: skip

Talk = Sequence[str]
"""The text of each message."""


def pair(row: Row) -> list[Ours]:
    """Give the better answer, then the worse one, after what both begin with."""
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
    talks = ([*map(json.loads, [*asked, *answer])] for answer in (good, bad))
    if (why_not := why_no_pair(*talks)) is not None:
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


def _trl(row: Row) -> tuple[Talk, Talk, Talk]:
    good, bad = row.get("chosen"), row.get("rejected")
    if good is None or bad is None:
        raise wrong("a pair needs `chosen` and `rejected`")
    is_text = isinstance(good, str) and good.lstrip()[:2] not in ("[{", "[ ")
    if isinstance(good, str) != isinstance(bad, str):
        raise wrong(f"`chosen` and `rejected` differ in shape: {short(good)} and {short(bad)}")
    if is_text:
        return _of_text(row, good, bad)
    talks = row.messages("chosen") or [], row.messages("rejected") or []
    if _is_answer(talks[0]) and _is_answer(talks[1]):
        return _prompt(row), *talks
    return _split(*talks)


def _of_text(row: Row, good: str, bad: str) -> tuple[Talk, Talk, Talk]:
    asked = _prompt(row)
    if not asked:  # TRL's implicit prompt: what both begin with, up to the last space
        same = shared(good, bad)
        same -= good[same - 1 : same] == " "
        asked = [message("user", good[:same])] if same > 0 else []
        good, bad = good[same:], bad[same:]
    return asked, [message("assistant", good)], [message("assistant", bad)]


def _prompt(row: Row) -> Talk:
    value = row.get("prompt")
    if isinstance(value, str) and value.lstrip()[:2] != "[{":
        return [message("user", value)]
    return row.messages("prompt") or []


def _is_answer(talk: Talk) -> bool:
    return json.loads(talk[0])["role"] == "assistant"


def _split(good: Talk, bad: Talk) -> tuple[Talk, Talk, Talk]:
    """Tell the prompt from the answers: it is what both conversations begin with."""
    same = shared([*map(json.loads, good)], [*map(json.loads, bad)])
    return good[:same], good[same:], bad[same:]


def _openai(row: Row) -> tuple[Talk, Talk, Talk, str | None]:
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
