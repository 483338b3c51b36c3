"""Named formats: each is identified by its columns and converted to our rows."""

from collections.abc import Collection, Mapping

from .chat import CHAT
from .format import Format, Row
from .preferences import PREFERENCES
from .sharegpt import SHAREGPT
from .trainer_dumps import IDS, TRL, VERL, VERL_TASKS
from .trinity import TRINITY

GSM8K = Format(
    "gsm8k",
    '{"question", "answer"} of GSM8K',
    needs=(frozenset({"question", "answer"}),),
    selects={
        "tasks": "SELECT question AS prompt_text, answer FROM input",
        "experiences": "SELECT question AS prompt_text, answer, answer AS response_text, "
        "1.0 AS reward, 'expert' AS source FROM input",
    },
    known_by=(),
)

FORMATS: Mapping[str, Format] = {
    f.name: f for f in (CHAT, PREFERENCES, SHAREGPT, TRL, VERL, VERL_TASKS, IDS, TRINITY, GSM8K)
}
"""All of them by name."""


def recognized(columns: Collection[str], table: str) -> Format | None:
    """Return the only format of a table that a file with these columns can have, or None."""
    found = [f for f in FORMATS.values() if table in f.tables and f.is_sure(columns)]
    return found[0] if len(found) == 1 else None


def fitting(columns: Collection[str], table: str) -> list[str]:
    """Return the formats that fit these columns but are not recognized without a name."""
    named = (f for f in FORMATS.values() if f.known_by == () and table in f.tables)
    return [f.name for f in named if f.fits(columns)]


__all__ = ["FORMATS", "Format", "Row", "fitting", "recognized"]
