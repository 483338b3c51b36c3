"""What is printed when a command fails: one line, or a traceback for a mistake of ours."""

import errno
import re
import sys
import traceback

import duckdb

from ...store.errors import RlakeError, damaged
from ...store.query import query_error
from .exit_codes import FAILED, MISUSED

_LONGEST = 2000
"""Most characters of an error to print."""
_LONGEST_PATH = 200
_MISNAMED = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)
"""Errors of the path itself, whatever is stored there."""
_FROM_LANCE = re.compile(r"LanceError\(|/lance/rust/")


def failed(error: Exception) -> int:
    """Print why a command failed, and return its exit code."""
    if isinstance(error, duckdb.Error):
        error = query_error(error)
    elif not isinstance(error, RlakeError) and _FROM_LANCE.search(str(error)):
        error = damaged(f"the store ({type(error).__name__})", error)
    if isinstance(error, RlakeError):
        say(str(error))
        return error.exit_code
    if isinstance(error, OSError) and error.filename is not None:  # about a given path
        name = str(error.filename)
        name = name if len(name) <= _LONGEST_PATH else f"{name[:_LONGEST_PATH]}..."
        say(f"cannot use the path `{name}`: {error.strerror}")
        return MISUSED if error.errno in _MISNAMED else FAILED
    traceback.print_exception(error)
    say(f"unexpected {type(error).__name__}: this is a mistake in rlake; please report it")
    return FAILED


def say(message: str) -> None:
    """Print an error as one line."""
    line = " ".join(message.split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
    print(f"error: {line}", file=sys.stderr)
