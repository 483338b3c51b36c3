"""A labeling question, and the labels to choose from."""

import re
from dataclasses import dataclass

from ...store.errors import ConfigError

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_MOST = 20
_LONGEST = 40


@dataclass(frozen=True)
class Choice:
    """A label with its score."""

    label: str
    score: float | None = None


@dataclass(frozen=True)
class Question:
    """The question that annotators answer for each item."""

    text: str
    choices: tuple[Choice, ...]

    def meant(self, word: str) -> Choice | None:
        """Return the choice with this label, or at this place; None when there is none.

        Where a label is such a number, as in 0..4, numbers mean labels alone.
        """
        named = {c.label: c for c in self.choices}
        numbered = {str(i): c for i, c in enumerate(self.choices, 1)}
        return named.get(word) or (None if named.keys() & numbered.keys() else numbered.get(word))

    def keyed(self, number: int) -> str:
        """Return the label at a place from 1 on, after the number that means it."""
        choice = self.choices[number - 1]
        is_number = self.meant(str(number)) is choice and choice.label != str(number)
        return f"{number} {choice.label}" if is_number else choice.label


GOOD = Question("Is this answer good?", (Choice("good", 1.0), Choice("bad", 0.0)))
"""The default question."""

PAIR = Question(
    "Which answer is better?", (Choice("first", 1.0), Choice("second", 0.0), Choice("tie", 0.5))
)
"""The question that compares two rollouts; the score is 1 where the first is better."""


def parse_choices(text: str) -> tuple[Choice, ...]:
    """Read the choices of a command line: labels, labels with scores, or a range of scores.

    >>> parse_choices("good=1,bad=0")
    (Choice(label='good', score=1.0), Choice(label='bad', score=0.0))
    >>> [c.label for c in parse_choices("1..3")]
    ['1', '2', '3']

    Raises ConfigError for fewer than two labels, more than 20, or duplicates.
    """
    span = _RANGE.fullmatch(text.strip())
    if span:
        low, high = int(span[1]), int(span[2])
        made = [Choice(str(i), float(i)) for i in range(low, min(high, low + _MOST) + 1)]
    else:
        made = [_choice(part) for part in text.split(",") if part.strip()]
    labels = [c.label for c in made]
    if not 2 <= len(made) <= _MOST or len(set(labels)) < len(labels):
        raise ConfigError(
            f"`{text}` gives the labels {labels}, expected 2 to {_MOST} different ones, such as "
            "`good=1,bad=0` or `1..5`"
        )
    return tuple(made)


def _choice(part: str) -> Choice:
    label, is_scored, score = part.partition("=")
    label = label.strip()
    if not label or len(label) > _LONGEST:
        raise ConfigError(f"a label has 1 to {_LONGEST} characters, got {label!r}")
    try:
        return Choice(label, float(score) if is_scored else None)
    except ValueError:
        raise ConfigError(f"the score of label `{label}` must be a number, got `{score}`") from None
