"""Sessions that the store refuses for good: kept in files, so that they hold up no other."""

import json
from itertools import groupby
from pathlib import Path

from ...store.errors import ConflictError, JobError, SchemaError
from ..chat_api.sessions import Session
from .journal_entries import session_entry

NEVER = (SchemaError, ConflictError, JobError, TypeError, ValueError, KeyError, AttributeError)
"""What does not pass when it is tried again, since it is the rows' own."""


def set_aside(folder: Path, session: Session) -> Path:
    """Write a session's entries, as the journal has them; return the file."""
    pairs = zip(session.responses, session.turns, strict=True)
    entries = [
        session_entry(session, [turn for _, turn in same], name)
        for name, same in groupby(pairs, key=lambda pair: pair[0])
    ]
    path = folder / f"refused-{session.key}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    said = {"key": session.key, "feedback": session.feedback}
    path.write_text("".join(json.dumps(entry) + "\n" for entry in [*entries, said]))
    return path
