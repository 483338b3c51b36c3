"""What a line of an export is made of: conversations and pairs, in messages or in plain text."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .jsontext import Raw, dumps, elements, listed, one_line
from .turns import turns
from .writing import Line

TALK = ("messages", "prompt_text", "response_text", "tools")
"""Columns that a conversation is read from."""

Talk = list[str]
"""The text of each message, spelled as it came."""
Row = Mapping[str, object]


class LeftOut(Exception):
    """A row has nothing to write; the message says why, of the row."""


@dataclass(frozen=True)
class Shape:
    """What a line of an export is made of, and how."""

    about: str
    """Half a line, for people who choose one."""
    line: Callable[[Row], Line] | None = None
    """Makes a line of a row; raises LeftOut for a row that has none. None: the row as it is."""
    is_pairs: bool = False
    """Whether a row names two experiences, `chosen_id` and `rejected_id`."""
    reads: tuple[str, ...] = TALK
    """Columns that it reads."""
    needs: tuple[frozenset[str], ...] = (
        frozenset({"messages"}),
        frozenset({"prompt_text", "response_text"}),
    )
    """Columns of which a SELECT must give one set."""
    has_plain: bool = False
    """Whether there is a form of plain text, too."""


def plain(line: Line) -> Line:
    """Return a line of messages as one of plain text; raises LeftOut when it is more than that.

    Only a question of one user message, and one answer, can be told without a chat template.
    """
    if "tools" in line:
        raise LeftOut("plain text has no tools")
    made = dict(line)
    for name in ("prompt", "completion", "chosen", "rejected"):
        if name in line:
            made[name] = _text(line[name], "user" if name == "prompt" else "assistant")
    return made


def pair(row: Row, chosen: Row | None, rejected: Row | None) -> Line:
    """Return a line of a pair: what both conversations begin with, and how each goes on."""
    if chosen is None or rejected is None:
        raise LeftOut("its experiences are not both stored")
    good, bad = _conversation(chosen), _conversation(rejected)
    same = 0
    while same < min(len(good), len(bad)) and _message(good[same]) == _message(bad[same]):
        same += 1
    if same == len(good) == len(bad):
        raise LeftOut("its answers are equal")
    if not same:
        raise LeftOut("its answers are to different questions")
    if same in (len(good), len(bad)):
        raise LeftOut("one of its answers is the beginning of the other")
    told = {
        "prompt": listed(good[:same]),
        "chosen": listed(good[same:]),
        "rejected": listed(bad[same:]),
    }
    return told | _tools(chosen)


def _rated_pair(row: Row, chosen: Row | None, rejected: Row | None) -> Line:
    told = pair(row, chosen, rejected)
    if row.get("margin") is None:
        raise LeftOut("its margin is NULL")
    return {**told, "margin": row["margin"]}


PAIR_LINES = {"dpo": pair, "reward": _rated_pair}
"""Makes a line of a row that names two experiences, and of the two; by the name of the export."""


def _conversation(row: Row) -> Talk:
    """Return the row's conversation; raises LeftOut when it has none that ends with an answer."""
    text = row.get("messages")
    if text:
        talk = elements(one_line(str(text)))
        if talk and _message(talk[-1]).get("role") == "assistant":
            return talk
    prompt, response = row.get("prompt_text"), row.get("response_text")
    if prompt is None or response is None:
        raise LeftOut("it has no question and answer in text")
    asked, said = {"role": "user", "content": prompt}, {"role": "assistant", "content": response}
    return [dumps(asked), dumps(said)]


def _message(text: str) -> dict[str, object]:
    return json.loads(text)


def _tools(row: Row) -> dict[str, Any]:
    return {"tools": one_line(str(row["tools"]))} if row.get("tools") else {}


def _text(messages: Any, role: str) -> str:
    talk = [_message(m) for m in elements(messages)]
    if [m.get("role") for m in talk] != [role]:
        raise LeftOut("plain text is one question of a user and one answer")
    if not isinstance(talk[0].get("content"), str) or talk[0].get("tool_calls"):
        raise LeftOut("a message of it is more than text")
    return str(talk[0]["content"])


def _sft(row: Row) -> Line:
    talk = _conversation(row)
    if len(talk) < 2:
        raise LeftOut("it has no question and answer in text")
    return {"prompt": listed(talk[:-1]), "completion": listed(talk[-1:])} | _tools(row)


def _kto(row: Row) -> Line:
    line = _sft(row)
    if row.get("label") is None:
        raise LeftOut("its label is NULL")
    return {**line, "label": row["label"]}


def _chat(row: Row) -> Line:
    talk = _conversation(row)
    has_text = row.get("messages") and len(talk) == len(elements(str(row["messages"])))
    whole: Raw = one_line(str(row["messages"])) if has_text else listed(talk)
    return {"messages": whole} | _tools(row)


def _sharegpt(row: Row) -> Line:
    said = turns([_message(m) for m in _conversation(row)])
    if not said:
        raise LeftOut("it has no form in turns of text")
    system = {"system": said.pop(0)["value"]} if said[0]["from"] == "system" else {}
    return {"conversations": said} | system | _tools(row)


_TWO_IDS = (frozenset({"chosen_id", "rejected_id"}),)

EXPORTS = {
    "sft": Shape(
        '{"prompt", "completion"}: conversations and their last answer, for TRL',
        _sft,
        has_plain=True,
    ),
    "dpo": Shape(
        '{"prompt", "chosen", "rejected"}: the pairs of `preferences`, for TRL',
        is_pairs=True,
        reads=("*",),
        needs=_TWO_IDS,
        has_plain=True,
    ),
    "reward": Shape(
        '{"prompt", "chosen", "rejected", "margin"}: pairs for a reward model of TRL',
        is_pairs=True,
        reads=("*",),
        needs=(frozenset({"chosen_id", "rejected_id", "margin"}),),
        has_plain=True,
    ),
    "kto": Shape(
        '{"prompt", "completion", "label"}: true where the reward is above 0, for TRL',
        _kto,
        reads=(*TALK, "label"),
        needs=(
            frozenset({"messages", "label"}),
            frozenset({"prompt_text", "response_text", "label"}),
        ),
        has_plain=True,
    ),
    "chat": Shape('{"messages", "tools"}: whole conversations, as OpenAI fine-tuning', _chat),
    "sharegpt": Shape('{"conversations": [{"from", "value"}], "system", "tools"}', _sharegpt),
    "experiences": Shape("all columns, or those of any SELECT", reads=("*",), needs=()),
}
"""What can be exported, by name."""
