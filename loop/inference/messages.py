"""The conversation after a turn, and whether a new request continues it."""

from collections.abc import Sequence

from ...store.records import Message
from .policy import Turn


def after(turn: Turn) -> list[Message]:
    """Return the conversation after a turn; the prefix of an answer becomes part of the answer."""
    asked, answer = list(turn.messages), turn.completion.answer
    if not is_begun(asked):
        return [*asked, answer]
    whole = f"{asked[-1].get('content') or ''}{answer.get('content') or ''}"
    return [*asked[:-1], {**answer, "content": whole}]


def is_begun(messages: Sequence[Message]) -> bool:
    """Return whether the last message is the beginning of the requested answer."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def begins(turn: Turn, messages: Sequence[Message]) -> bool:
    """Return whether messages continue the conversation of a turn.

    >>> from rlake.loop.inference.policy import Completion
    >>> four = Completion(text="4", finish_reason="stop")
    >>> turn = Turn(messages=[{"role": "user", "content": "2+2="}], completion=four)
    >>> begins(turn, [*after(turn), {"role": "user", "content": "Thanks."}])
    True
    """
    before = after(turn)
    return len(before) <= len(messages) and all(map(_same, before, messages))


def _same(one: Message, other: Message) -> bool:
    # agents drop keys that are empty, or add some
    return one == other or _filled(one) == _filled(other)


def _filled(message: Message) -> Message:
    return {k: v for k, v in message.items() if v not in (None, "", [])}
