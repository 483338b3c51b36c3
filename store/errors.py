"""Errors. Each message says what was found, what was expected, and how to fix it."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from typing import Any, ClassVar

from pydantic import ValidationError


class RlakeError(Exception):
    """Root of every error that rlake raises on purpose.

    `exit_code` is the command line's: 2 when rlake was used wrongly, 1 when a job failed.
    """

    exit_code: ClassVar[int] = 2


class SchemaError(RlakeError, ValueError):
    """Rows do not fit the declared columns of a table."""


class ConflictError(RlakeError, ValueError):
    """A row has the id of a stored row, but other content."""


class QueryError(RlakeError, ValueError):
    """A query does not parse, names what does not exist, or would write."""


class ConfigError(RlakeError, ValueError):
    """A configuration key or value is not valid."""


class InputError(RlakeError, ValueError):
    """A file that was to be read is missing, empty or broken."""


class OperatorError(RlakeError, ValueError):
    """An operator was given wrong parameters, or broke the law of its kind."""


class NotFoundError(RlakeError, LookupError):
    """A name (table, snapshot, run, row) does not exist in the store."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StoreError(RlakeError, OSError):
    """The store cannot be opened, read or written."""

    exit_code = 1


class BusyError(StoreError):
    """The store is busy; the same append may be retried."""


class NotAStoreError(StoreError):
    """The address is not a store, or a store that this version cannot read."""

    exit_code = 2


class StarvedError(RlakeError, TimeoutError):
    """A bounded wait timed out; the message says what was needed and what was available."""

    exit_code = 1


class JobError(RlakeError, RuntimeError):
    """A job stopped because it could not do its work."""

    exit_code = 1


class MissingExtraError(RlakeError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


def missing_extra(package: str, extra: str) -> MissingExtraError:
    """Build the error for an optional package that is absent."""
    return MissingExtraError(
        f"`{package}` is not installed; install it with `pip install 'rlake[{extra}]'`"
    )


FAILURES = (OSError, ValueError, RuntimeError)
"""What the table format raises for errors of the disk or the object store."""


@contextmanager
def _turned(into: Callable[[Exception], StoreError]) -> Iterator[None]:
    try:
        yield
    except RlakeError:
        raise
    except FAILURES as error:
        raise into(error) from error


def as_store_error(what: str, *, fix: str = "") -> AbstractContextManager[None]:
    """Turn errors of the table format into StoreError; our own errors pass unchanged."""
    return _turned(lambda error: StoreError(f"{what}: {reason(error)}{fix and '; '}{fix}"))


_LIBRARY = re.compile(
    r"^(?:\w+: )?External error: (?:LanceError\(\w+\): )?(?:Generic \S+ error: )?"
)


def damaged(what: str, error: BaseException) -> StoreError:
    """Return the error for data that cannot be read because a file is missing or damaged."""
    said = _LIBRARY.sub("", reason(error))
    return StoreError(f"cannot read {what}: {said}; `rlake doctor` says which files are damaged")


def reading(what: str) -> AbstractContextManager[None]:
    """Turn errors of the table format while reading into StoreError; ours pass unchanged."""
    return _turned(lambda error: damaged(what, error))


def closest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that a misspelt one is most like, or None.

    >>> closest("Rewrad", ["reward", "task_id"])
    'reward'
    """
    lowered = {n.lower(): n for n in reversed(known)}
    close = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def nearest(name: str, known: object) -> str:
    """Return `; did you mean `x`?` for the closest known name, or what is known when none is close.

    >>> nearest("rewrad", ["reward", "task_id"])
    '; did you mean `reward`?'
    >>> nearest("zzz", ["reward", "task_id"])
    '; known are `reward`, `task_id`'
    """
    names = sorted(str(k) for k in known)  # type: ignore[attr-defined]
    close = closest(name, names)
    if close is not None:
        return f"; did you mean `{close}`?"
    if not names:
        return ""
    shown = ", ".join(f"`{n}`" for n in names[:12])
    return f"; known are {shown}" + (" and others" if len(names) > 12 else "")


_GIVE_KEYS = (
    "give them as `storage_options`, or as `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` in the "
    "environment"
)
_S3_SAYS = {
    r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|(Invalid|Expired)Token|403 Forbidden": (
        f"the credentials were refused ({{}}); {_GIVE_KEYS}"
    ),
    r"(?i)failed to get AWS credentials": f"no credentials were found; {_GIVE_KEYS}",
    r"error sending request|HttpError|TimeoutError": (
        "the address does not answer; check the network, and `endpoint` in `storage_options` or "
        "`AWS_ENDPOINT_URL` in the environment"
    ),
    r"NoSuchBucket": "the bucket does not exist ({})",
}
# By words: Lance passes the errors of object stores on as text.
_BUSY = ("conflict", "slowdown", "slow down", "throttl", " 500 ", " 502 ", " 503 ", " 504 ",
         "timed out", "timeout", "connection")  # fmt: skip


def write_error(name: str, error: Exception) -> StoreError:
    """Turn an error of the table format while writing into BusyError or StoreError."""
    said = f"cannot write to `{name}`: {reason(error)}"
    if any(word in str(error).lower() for word in _BUSY):
        return BusyError(f"{said}; try it again, what is stored already is left out")
    return StoreError(f"{said}; nothing was stored")


def no_room(error: OSError, outcome: str = "") -> StoreError:
    """Return the error for a temporary file that cannot be written."""
    why = os.strerror(error.errno) if error.errno else reason(error)
    advice = "name a folder with room in TMPDIR"
    return StoreError(f"cannot write a temporary file: {why}; {advice}{outcome}")


def reason(error: BaseException) -> str:
    """Return the first sentence of a library's error, without positions in its source code."""
    for pattern, message in _S3_SAYS.items():
        if found := re.search(pattern, str(error)):
            return message.format(found[0])
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = text.split(", /")[0].split(" at /")[0].strip().rstrip(".")
    return shorten(text)


def message_of(error: BaseException, most: int = 300) -> str:
    """Return an error's message on one line, or the error's type where it has no message.

    >>> message_of(ValueError("no\\n  number")), message_of(KeyError())
    ('no number', 'KeyError')
    """
    return shorten(" ".join(str(error).split()) or type(error).__name__, most)


def first_invalid(error: ValidationError) -> tuple[str, str, Any]:
    """Return where the first invalid value is, what is wrong with it, and the value itself."""
    first = error.errors(include_url=False)[0]
    message = first["msg"]
    return ".".join(map(str, first["loc"])), message[:1].lower() + message[1:], first["input"]


def counted(count: int, one: str, several: str = "") -> str:
    """Return a number with its noun.

    >>> counted(1, "row"), counted(8792, "task"), counted(2, "branch", "branches")
    ('1 row', '8,792 tasks', '2 branches')
    """
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


def shorten(text: str, most: int = 300) -> str:
    """Return a text, cut after `most` characters.

    >>> shorten("a long story", 6)
    'a long...'
    """
    return text if len(text) <= most else f"{text[:most]}..."
