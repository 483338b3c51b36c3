"""Extract the answer from an experience: the last reply, and the number, box or code in it."""

import re
from decimal import Decimal

from ..store.conversation import text_of
from ..store.records import Experience

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = rf"(?:[-+]?[$€£]?|[$€£][-+])(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_MARKED = re.compile(rf"(?:####|(?:^|\n)\s*A:)\s*({_NUMBER})")
_ANY = re.compile(rf"(?<![\w.]){_NUMBER}")
_MARK = re.compile(r"(?:####|(?:^|\n)\s*A:)([^\n]*)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_NO_MATTER = (
    (r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1"),
    (r"\\[!,;: ]|~|\\?\$|\s", ""),
    (r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))", ""),
)


def reply(experience: Experience) -> str:
    """Return the text of the last reply: the last assistant message, or else `response_text`.

    >>> parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "4."}]
    >>> reply(Experience(task_id="t", messages=[{"role": "assistant", "content": parts}]))
    'It is 4.'
    """
    for message in reversed(experience.messages or ()):
        if message.get("role") == "assistant":
            return text_of(message.get("content")) or ""
    return experience.response_text or ""


def number_in(text: str) -> Decimal | None:
    """Return the number that a solution ends in, or None.

    >>> number_in("16 - 3 - 4 = 9 eggs\\nA: 18"), number_in("none")
    (Decimal('18'), None)
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    found = _MARKED.findall(text) or _ANY.findall(text)
    return Decimal(re.sub(r"[^\d.+-]", "", found[-1])) if found else None


def boxed_in(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` or `\fbox{...}`; None if it is not closed.

    >>> boxed_in(r"\boxed{1}, no: \boxed{\frac{1}{2}}"), boxed_in(r"\boxed{1}, no: \boxed{2")
    ('\\frac{1}{2}', None)
    """
    found = list(_BOX.finditer(text))
    if not found:
        return None
    start, depth = found[-1].end(), 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def plain(answer: str) -> str:
    r"""Return a short answer without what does not change it: space, `$`, sizes, units' wrapping.

    >>> plain(r" $\left( \dfrac{1}{2}, 1{,}000 \right)$. ")
    '(\\frac{1}{2},1000)'
    """
    for pattern, kept in _NO_MATTER:
        answer = re.sub(pattern, kept, answer)
    return answer.rstrip(".")


def code_in(text: str) -> str:
    """Return the last closed fenced block of a reply, else all of it.

    >>> code_in("Here:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    """
    blocks = re.findall(r"^```[^\n`]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return blocks[-1] if blocks else text


def marked(text: str) -> str:
    """Return the text after the last `####` or a line's `A:`, else the whole text.

    >>> marked("48/2 = 24\\n#### 72"), marked("It is 72.")
    ('72', 'It is 72.')
    """
    found = _MARK.findall(text)
    return found[-1].strip() if found and found[-1].strip() else text
