"""What a conversation says: the text of its messages, its last answer, where two of them part."""

from collections.abc import Mapping, Sequence
from typing import Any

Talk = Sequence[Mapping[str, Any]]
"""Messages in the chat format, in their order."""

NO_ANSWER = "it has no assistant turn"
EMPTY = "its assistant turns are empty"
PARTED = "its conversations part at a question, not at an answer"


def text_of(content: object) -> str | None:
    """Return the text of a message's content: its own, or that of its parts one after the other.

    >>> text_of([{"type": "text", "text": "What is "}, {"type": "image_url"}, {"text": "this?"}])
    'What is this?'
    """
    if isinstance(content, str) or not isinstance(content, list):
        return content if isinstance(content, str) else None
    given = [p.get("text") if isinstance(p, Mapping) else p for p in content]
    texts = [t for t in given if isinstance(t, str)]
    return "".join(texts) if texts else None


def is_text(content: object) -> bool:
    """Tell whether a message's content is nothing but text, or there is none."""
    parts = content if isinstance(content, list) else []
    texts = (p.get("text") if isinstance(p, Mapping) else p for p in parts)
    return all(isinstance(text, str) for text in texts)


def is_answer(message: Mapping[str, Any]) -> bool:
    """Tell whether an assistant wrote a message."""
    return message.get("role") == "assistant"


def calls_of(message: Mapping[str, Any]) -> Sequence[Any]:
    """Return the tool calls of a message, OpenAI's older `function_call` included."""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        return calls
    function = message.get("function_call")
    return [{"type": "function", "function": function}] if function else []


def last_question(messages: Talk) -> str | None:
    """Return the text of the last user message."""
    users = [m for m in messages if m.get("role") == "user"]
    return text_of(users[-1].get("content")) if users else None


def last_answer(messages: Talk) -> str | None:
    """Return the text of the last assistant turn that says something, beside calling tools.

    >>> call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    >>> last_answer([{"role": "assistant", "content": "Let me see."}, call, {"role": "tool"}])
    'Let me see.'
    """
    for message in filter(is_answer, reversed(messages)):
        text = text_of(message.get("content"))
        if text or (text is not None and not calls_of(message)):
            return text
    return None


def goes_on(messages: Talk, response: str | None) -> bool:
    """Tell whether a row's `response_text` stands behind its messages, and is not in them."""
    if response is None or (messages and is_answer(messages[-1])):
        return False
    return all(text_of(m.get("content")) != response for m in messages if is_answer(m))


def why_untrainable(messages: Talk) -> str | None:
    """Say why no model can be trained on a conversation, None where one can.

    An answer of no text is one: its end is what is learned.
    """
    answers = [m for m in messages if is_answer(m)]
    if not answers:
        return NO_ANSWER
    says = any(text_of(m.get("content")) is not None or calls_of(m) for m in answers)
    return None if says else EMPTY


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many messages two conversations begin with in common, or two texts letters.

    >>> shared("four", "fourteen")
    4
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def why_no_pair(chosen: Talk, rejected: Talk) -> str | None:
    """Say why two conversations are not a better and a worse answer to one question."""
    same = shared(chosen, rejected)
    if same == len(chosen) == len(rejected):
        return "its answers are equal"
    if same in (len(chosen), len(rejected)):
        return "one of its answers is the beginning of the other"
    if not same:
        return "its answers are to different questions"
    part = is_answer(chosen[same]) and is_answer(rejected[same])
    return None if part else PARTED
