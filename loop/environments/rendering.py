"""Render Gymnasium observations as text: `show` names one of these functions, or another one.

A renderer is `(environment, observation) -> text`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gymnasium import Env

__all__ = ["drawing", "numbers"]

PARTS = {"Blackjack": ("your sum", "dealer's card", "usable ace")}
"""Names of the parts of an observation, by the environment's name without its version."""
_MARKED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)


def drawing(env: "Env[Any, Any]", observation: Any) -> str:
    """Show what the environment draws for a terminal (`render_mode` ansi), without colors."""
    return plain(str(env.render()))


def numbers(env: "Env[Any, Any]", observation: Any) -> str:
    """Show the observation: a number, or parts with their names."""
    kind = env.spec.id.rpartition("/")[2].rpartition("-v")[0] if env.spec else ""
    return described(observation, PARTS.get(kind, ())) + "\n"


def plain(text: str) -> str:
    r"""Return what was drawn for a terminal as plain text: what had a color is put in brackets.

    >>> plain("\n\x1b[41mS\x1b[0mFF\nFHG\n")
    '[S]FF\nFHG\n'
    """
    return _MARKED.sub(lambda found: f"[{found.group(1)}]", text).strip("\n") + "\n"


def described(observation: Any, parts: Sequence[str] = ()) -> str:
    """Return an observation as text.

    >>> described((14, 10, 0), ("your sum", "dealer's card", "usable ace"))
    "your sum: 14, dealer's card: 10, usable ace: 0"
    >>> described({"at": 3, "goal": 5}), described(7)
    ('at: 3, goal: 5', '7')
    """
    if isinstance(observation, Mapping):
        return ", ".join(f"{name}: {described(part)}" for name, part in observation.items())
    if isinstance(observation, tuple | list):
        message = [described(part) for part in observation]
        if len(parts) == len(message):
            message = [f"{name}: {part}" for name, part in zip(parts, message, strict=True)]
        return ", ".join(message)
    return str(observation.tolist() if hasattr(observation, "tolist") else observation)
