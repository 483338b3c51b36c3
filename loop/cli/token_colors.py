"""Tokens as people see them: what was told is dim, what was sampled is coloured by its chance."""

from collections.abc import Mapping, Sequence
from math import exp
from typing import Any

from rich.padding import Padding
from rich.text import Text

from .tables import print_fields, print_heading, screen

SHADES = ((0.9, "green"), (0.5, "cyan"), (0.1, "yellow"), (0.01, "magenta"), (0.0, "bold red"))
"""From which probability on a sampled token has which colour."""
_TOLD, _UNKNOWN = "dim", "underline"


def shade(logprob: float) -> str:
    """Return the colour of a token that was sampled with a log-prob.

    >>> shade(-0.01), shade(-1.0), shade(-9.0)
    ('green', 'yellow', 'bold red')
    """
    return next(style for least, style in SHADES if exp(min(logprob, 0.0)) >= least)


def colored(pieces: Sequence[str], mask: Sequence[bool], logprobs: Sequence[float] | None) -> Text:
    """Return tokens in their colours; what cannot be seen, as the end token's, is written out."""
    text = Text()
    for i, (piece, sampled) in enumerate(zip(pieces, mask, strict=True)):
        style = _TOLD
        if sampled:
            style = _UNKNOWN if logprobs is None else shade(logprobs[i])
        text.append(piece.replace("\n", "⏎\n"), style=style)
    return text


def legend() -> Text:
    """Return what the colours mean."""
    text = Text("told ", style=_TOLD)
    for least, style in SHADES:
        text.append(f" {'>=' if least else '<'} {least or SHADES[-2][0]:g} ", style=style)
    return text


def print_tokens(row: Mapping[str, Any], pieces: Sequence[str]) -> None:
    """Print a row's tokens in the colours of their probabilities."""
    console = screen()
    print_heading("tokens, by the probability that they were sampled with")
    console.print(Padding(legend(), (0, 0, 0, 2)))
    console.print(Padding(colored(pieces, row["loss_mask"], row["logprobs"]), (0, 0, 0, 2)))


def print_turns(messages: Sequence[Mapping[str, Any]]) -> None:
    """Print a conversation, turn by turn."""
    print_heading("turns")
    summary: dict[str, str] = {}
    for i, message in enumerate(messages):
        said = str(message.get("content") or "")
        for call in message.get("tool_calls") or ():
            function = call.get("function", {})
            said += f"\n-> {function.get('name') or '?'}({function.get('arguments')})"
        summary[f"{i + 1} {message.get('role')}"] = said.strip()
    print_fields(summary, indent=2)
