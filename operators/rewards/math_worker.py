"""The program that compares answers by math-verify, one line of JSON after the other.

It is run as a file, for it is not to load the rest of the package. A comparison that takes too
long, or too much memory, ends the process: no loop in compiled code can go on.
"""

import json
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY = 2 << 30
"""Bytes of address space; math-verify needs a fifth of it."""

_NAMES = r"(?:sin|cos|tan|log|exp|sqrt|max|min|inf|and)\b"
_WORD = re.compile(rf"(?<![\\a-zA-Z])(?!{_NAMES})[a-zA-Z]{{3,}}")
_LATEX = ("$", r"\boxed", r"\(", r"\[")


def main() -> None:
    """Read `[reference, reply, seconds]`, write `[value, detail]`, until the input ends."""
    read("$1$")
    _say("ready")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        gold, text, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles it: the process ends
        said = compare(gold, text)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(json.dumps(said))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def compare(gold: str, text: str) -> tuple[float | None, str | None]:
    """Return the reward, and why it is not just right or wrong."""
    from math_verify import verify

    expected, found = read(gold), read(text)
    if not expected:
        return None, "the reference is not mathematics"
    if not found:
        return 0.0, "no mathematical answer was found"
    return float(verify(expected, found, timeout_seconds=0)), None


@lru_cache(maxsize=256)
def read(text: str) -> list[Any]:
    """Return what a text may mean; a short one without words is read as a formula."""
    from math_verify import parse

    is_prose = _WORD.search(re.sub(r"\\text\s*\{[^{}]*\}", "", text)) or "\n" in text.strip()
    if is_prose or any(mark in text for mark in _LATEX):
        return parse(text, parsing_timeout=0)
    return parse(f"${text.strip()}$", parsing_timeout=0) or parse(text, parsing_timeout=0)


if __name__ == "__main__":
    main()
