"""Conversations: the text of messages, the last answer, and where two conversations diverge."""

from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
"""Messages in the chat format, in their order."""

CONVERSATION = 'a list of objects with a `role`, such as [{"role": "user", "content": "2+2="}]'
"""What `messages` hold, for errors."""
NO_ANSWER = "it has no assistant turn"
EMPTY = "its assistant turns are empty"
PARTED = "its conversations part at a question, not at an answer"


def text_of(content: object) -> str | None:
    """Return the text of a message's content, or the texts of its parts joined.

    >>> text_of([{"type": "text", "text": "What is "}, {"type": "image_url"}, {"text": "this?"}])
    'What is this?'
    """
    if isinstance(content, str) or not isinstance(content, list):
        return content if isinstance(content, str) else None
    given = [p.get("text") if isinstance(p, Mapping) else p for p in content]
    texts = [t for t in given if isinstance(t, str)]
    return "".join(texts) if texts else None


def is_text(content: object) -> bool:
    """Return whether a message's content is only text, or empty."""
    parts = content if isinstance(content, list) else []
    texts = (p.get("text") if isinstance(p, Mapping) else p for p in parts)
    return all(isinstance(text, str) for text in texts)


def is_conversation(messages: object) -> bool:
    """Return whether a value is a list of messages, each with the name of a role.

    >>> is_conversation([{"role": "user", "content": "2+2="}]), is_conversation(["2+2="])
    (True, False)
    """
    given = messages if isinstance(messages, list | tuple) else [None]
    return all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in given)


def is_answer(message: Mapping[str, Any]) -> bool:
    """Return whether an assistant wrote a message."""
    return message.get("role") == "assistant"


def calls_of(message: Mapping[str, Any]) -> Sequence[Any]:
    """Return the tool calls of a message, OpenAI's older `function_call` included."""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        return calls
    function = message.get("function_call")
    return [{"type": "function", "function": function}] if function else []


def last_question(messages: Messages) -> str | None:
    """Return the text of the last user message."""
    users = [m for m in messages if m.get("role") == "user"]
    return text_of(users[-1].get("content")) if users else None


def last_answer(messages: Messages) -> str | None:
    """Return the text of the last assistant turn that has text and not only tool calls.

    >>> call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    >>> last_answer([{"role": "assistant", "content": "Let me see."}, call, {"role": "tool"}])
    'Let me see.'
    """
    for message in filter(is_answer, reversed(messages)):
        text = text_of(message.get("content"))
        if text or (text is not None and not calls_of(message)):
            return text
    return None


def goes_on(messages: Messages, response: str | None) -> bool:
    """Return whether a row's `response_text` follows its messages and is not one of them."""
    if response is None or (messages and is_answer(messages[-1])):
        return False
    return all(text_of(m.get("content")) != response for m in messages if is_answer(m))


def why_untrainable(messages: Messages) -> str | None:
    """Return why a conversation cannot be trained on, or None if it can.

    An empty answer can be trained on: the model learns to stop.
    """
    answers = [m for m in messages if is_answer(m)]
    if not answers:
        return NO_ANSWER
    says = any(text_of(m.get("content")) is not None or calls_of(m) for m in answers)
    return None if says else EMPTY


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two conversations, or of two texts.

    >>> shared("four", "fourteen")
    4
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def why_no_pair(chosen: Messages, rejected: Messages) -> str | None:
    """Return why two conversations are not two answers to one question, or None if they are."""
    same = shared(chosen, rejected)
    if same == len(chosen) == len(rejected):
        return "its answers are equal"
    if same in (len(chosen), len(rejected)):
        return "one of its answers is the beginning of the other"
    if not same:
        return "its answers are to different questions"
    part = is_answer(chosen[same]) and is_answer(rejected[same])
    return None if part else PARTED
