"""What stands behind a turn, and whether a conversation goes on there."""

from collections.abc import Sequence

from ...store.records import Message
from .policy import Turn


def after(turn: Turn) -> list[Message]:
    """Return the conversation behind a turn: an answer that was begun for the policy is one."""
    asked, answer = list(turn.messages), turn.completion.answer
    if not is_begun(asked):
        return [*asked, answer]
    whole = f"{asked[-1].get('content') or ''}{answer.get('content') or ''}"
    return [*asked[:-1], {**answer, "content": whole}]


def is_begun(messages: Sequence[Message]) -> bool:
    """Tell whether the last message is the beginning of the answer that is asked for."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def begins(turn: Turn, messages: Sequence[Message]) -> bool:
    """Tell whether a conversation goes on behind a turn, question and answer.

    >>> from rlake.loop.inference.policy import Completion
    >>> told = Completion(text="4", finish_reason="stop")
    >>> turn = Turn(messages=[{"role": "user", "content": "2+2="}], completion=told)
    >>> begins(turn, [*after(turn), {"role": "user", "content": "Thanks."}])
    True
    """
    said = after(turn)
    if len(said) > len(messages):
        return False
    return all(_same(a, b) for a, b in zip(said, messages, strict=False))


def _same(one: Message, other: Message) -> bool:
    """Compare messages: agents drop keys that are empty, or add some."""
    return one == other or _filled(one) == _filled(other)


def _filled(message: Message) -> Message:
    return {k: v for k, v in message.items() if v not in (None, "", [])}
