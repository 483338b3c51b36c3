"""What was answered: the last reply of an experience, and the number that a solution ends in."""

import re
from decimal import Decimal

from ..store.records import Experience

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = rf"[-+]?[$€£]?[-+]?(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_MARKED = re.compile(rf"(?:####|(?:^|\n)\s*A:)\s*({_NUMBER})")
_ANY = re.compile(rf"(?<![\w.]){_NUMBER}")


def reply(experience: Experience) -> str:
    """Return the text of the last reply: the last assistant message, or else `response_text`."""
    for message in reversed(experience.messages or ()):
        if message.get("role") == "assistant":
            return str(message.get("content") or "")
    return experience.response_text or ""


def number_in(text: str) -> Decimal | None:
    """Return the number that a solution ends in, or None.

    >>> number_in("16 - 3 - 4 = 9 eggs\\nA: 18"), number_in("none")
    (Decimal('18'), None)
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    found = _MARKED.findall(text) or _ANY.findall(text)
    return Decimal(re.sub(r"[^\d.+-]", "", found[-1])) if found else None
