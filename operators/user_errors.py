"""The text that is kept of an error that users' code raised: what it says, and where it arose."""

import sysconfig
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from ..store.errors import RlakeError, shorten
from ..store.records import proper

_LONGEST = 1900
"""Most characters of a message."""
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def one_line(error: BaseException) -> str:
    """Return an error as one line: its type, its message, and the line of users' code it is from.

    Errors of rlake have no type in it, and those that no frame of users' code raised no line.

    >>> one_line(ValueError("no\\nnumber"))
    'ValueError: no number'
    """
    message = shorten(" ".join(proper(str(error)).split()), _LONGEST)
    kind = "" if isinstance(error, RlakeError) and message else type(error).__name__
    place = _place(error)
    return ": ".join(filter(None, (kind, message))) + (f" ({place})" if place else "")


def _place(error: BaseException | None) -> str | None:
    """Return `file.py:12` of the innermost frame of users' code, of the error or of its cause."""
    while error is not None:
        theirs = [(f, line) for f, line in walk_tb(error.__traceback__) if _is_users(f)]
        if theirs:
            frame, line = theirs[-1]
            return f"{Path(frame.f_code.co_filename).name}:{line}"
        error = error.__cause__
    return None


def _is_users(frame: FrameType) -> bool:
    file, module = frame.f_code.co_filename, frame.f_globals.get("__name__") or ""
    installed = file.startswith(("<", _STANDARD_LIBRARY)) or "-packages" in file
    return not installed and module.partition(".")[0] != __name__.partition(".")[0]
