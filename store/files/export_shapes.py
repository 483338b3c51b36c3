"""The lines of each export: conversations and pairs, as messages or as plain text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..conversation import NO_ANSWER, calls_of, goes_on, is_answer, shared, text_of, why_no_pair
from ..raw_json import Raw, dumps, elements, listed, one_line
from .atomic_writer import Line
from .formats.sharegpt import turns

CONVERSATION = ("messages", "prompt_text", "response_text", "tools")
"""Columns that a conversation is read from."""

Conversation = list[str]
"""The text of each message, spelled as it came."""
Row = Mapping[str, object]


class LeftOut(Exception):
    """A row has nothing to export; the message is the reason."""


@dataclass(frozen=True)
class Shape:
    """How an export makes its lines, and which columns it reads."""

    about: str
    """A short description for listings."""
    lines: Callable[[Row], list[Line]] | None = None
    """Makes the lines of a row; raises LeftOut when it has none. None: the row as it is."""
    is_pairs: bool = False
    """Whether a row names two experiences, `chosen_id` and `rejected_id`."""
    reads: tuple[str, ...] = CONVERSATION
    """Columns that it reads."""
    needs: tuple[frozenset[str], ...] = (
        frozenset({"messages"}),
        frozenset({"prompt_text", "response_text"}),
    )
    """Columns of which a SELECT must give one set."""
    has_plain: bool = False
    """Whether it can also be written as plain text."""


def plain(lines: Sequence[Line]) -> list[Line]:
    """Return a row's lines of messages as plain text; raises LeftOut when it is more than that.

    Only a question of one user message, and one answer, can be written without a chat template.
    """
    if len(lines) > 1:
        raise LeftOut(_NOT_PLAIN)
    [line] = lines
    if "tools" in line:
        raise LeftOut("plain text has no tools")
    made = dict(line)
    for name in ("prompt", "completion", "chosen", "rejected"):
        if name in line:
            made[name] = _text(line[name], "user" if name == "prompt" else "assistant")
    return [made]


_NOT_PLAIN = "plain text is one question of a user and one answer"


def rated_pair(chosen: Row | None, rejected: Row | None) -> Line:
    """Return the line of a pair: the prompt that both conversations share, and both answers."""
    if chosen is None or rejected is None:
        raise LeftOut("its experiences are not both stored")
    conversations = _conversation(chosen), _conversation(rejected)
    good, bad = ([_message(m) for m in conversation] for conversation in conversations)
    why_not = why_no_pair(good, bad)
    if why_not is not None:
        raise LeftOut(why_not)
    same = shared(good, bad)
    message = {
        "prompt": listed(conversations[0][:same]),
        "chosen": listed(conversations[0][same:]),
        "rejected": listed(conversations[1][same:]),
    }
    return {**message, **_tools(chosen)}


def _pair(chosen: Row | None, rejected: Row | None) -> Line:
    """Return a line of a pair for TRL's DPOTrainer, which trains on all tokens of both answers."""
    line = rated_pair(chosen, rejected)
    for name in ("chosen", "rejected"):
        if any(_message(m).get("role") == "user" for m in elements(line[name])):
            raise LeftOut("a user turn follows one of its answers, and would be trained on")
    return line


PAIR_LINES = {"dpo": _pair, "reward": rated_pair}
"""Makes a line of two experiences, the better one first; by the name of the export."""


def _conversation(row: Row) -> Conversation:
    """Return the row's conversation; raises LeftOut when nothing in it was answered."""
    said = row.get("response_text")
    response = None if said is None else str(said)
    if row.get("messages"):
        conversation = elements(one_line(str(row["messages"])))
        messages = [_message(m) for m in conversation]
        if goes_on(messages, response):
            return [*conversation, _answer(response)]
        if any(map(is_answer, messages)):
            return conversation
        raise LeftOut(NO_ANSWER)
    if row.get("prompt_text") is None or response is None:
        raise LeftOut("it has no question and answer in text")
    return [dumps({"role": "user", "content": row["prompt_text"]}), _answer(response)]


def _answer(text: str | None) -> Raw:
    return dumps({"role": "assistant", "content": text})


def _message(text: str) -> dict[str, Any]:
    return json.loads(text)


def _tools(row: Row) -> dict[str, Any]:
    return {"tools": one_line(str(row["tools"]))} if row.get("tools") else {}


def _text(messages: Any, role: str) -> str:
    conversation = [_message(m) for m in elements(messages)]
    if [m.get("role") for m in conversation] != [role]:
        raise LeftOut(_NOT_PLAIN)
    if not isinstance(conversation[0].get("content"), str) or conversation[0].get("tool_calls"):
        raise LeftOut("a message of it is more than text")
    return str(conversation[0]["content"])


def _sft(row: Row) -> list[Line]:
    """Return a line for each assistant turn, with all that stands before it as the prompt.

    TRL's SFTTrainer, whose conversational format this is, trains on completions only.
    """
    conversation = _conversation(row)
    return [{**_turn(conversation, place), **_tools(row)} for place in _answers(conversation)]


def _turn(conversation: Conversation, place: int) -> Line:
    prompt, completion = conversation[:place], conversation[place : place + 1]
    return {"prompt": listed(prompt), "completion": listed(completion)}


def _answers(conversation: Conversation) -> list[int]:
    """Return the positions of assistant messages with text or tool calls; LeftOut without any."""
    messages = [_message(m) for m in conversation]
    said = [
        place
        for place, m in enumerate(messages)
        if place and is_answer(m) and (text_of(m.get("content")) is not None or calls_of(m))
    ]
    if not said:
        raise LeftOut("it has no question and answer in text")
    return said


def _kto(row: Row) -> list[Line]:
    conversation = _conversation(row)
    line = {**_turn(conversation, _answers(conversation)[-1]), **_tools(row)}
    if row.get("label") is None:
        raise LeftOut("its label is NULL")
    return [{**line, "label": row["label"]}]


def _chat(row: Row) -> list[Line]:
    conversation = _conversation(row)
    has_text = row.get("messages") and len(conversation) == len(elements(str(row["messages"])))
    whole: Raw = one_line(str(row["messages"])) if has_text else listed(conversation)
    return [{"messages": whole} | _tools(row)]


def _sharegpt(row: Row) -> list[Line]:
    said = turns([_message(m) for m in _conversation(row)])
    if not said:
        raise LeftOut("it has no form in turns of text")
    system = {"system": said.pop(0)["value"]} if said[0]["from"] == "system" else {}
    return [{"conversations": said} | system | _tools(row)]


def _pairs(about: str) -> Shape:
    ids = (frozenset({"chosen_id", "rejected_id"}),)
    return Shape(about, is_pairs=True, reads=("*",), needs=ids, has_plain=True)


EXPORTS = {
    "sft": Shape(
        '{"prompt", "completion"}: a line for each assistant turn, for TRL', _sft, has_plain=True
    ),
    "dpo": _pairs('{"prompt", "chosen", "rejected"}: the pairs of `preferences`, for TRL'),
    "reward": _pairs('{"prompt", "chosen", "rejected", "margin"}: pairs for a reward model of TRL'),
    "kto": Shape(
        '{"prompt", "completion", "label"}: true where the reward is above 0, for TRL',
        _kto,
        reads=(*CONVERSATION, "label"),
        needs=tuple(columns | {"label"} for columns in Shape.needs),
        has_plain=True,
    ),
    "chat": Shape('{"messages", "tools"}: whole conversations, as OpenAI fine-tuning', _chat),
    "sharegpt": Shape('{"conversations": [{"from", "value"}], "system", "tools"}', _sharegpt),
    "experiences": Shape("all columns, or those of any SELECT", reads=("*",), needs=()),
}
"""What can be exported, by name."""
