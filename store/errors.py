"""What can go wrong, in words that say what was got, what was expected, and the way out."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import ClassVar


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
    """A query does not parse, names what is not there, or tries to write."""


class ConfigError(RlakeError, ValueError):
    """A configuration key or value is not valid."""


class InputError(RlakeError, ValueError):
    """A file that was to be read is missing, empty or broken."""


class OperatorError(RlakeError, ValueError):
    """An operator was given wrong parameters, or broke the law of its kind."""


class NotFoundError(RlakeError, LookupError):
    """A name (table, snapshot, run, row) that the store does not have."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StoreError(RlakeError, OSError):
    """The store cannot be opened, read or written."""

    exit_code = 1


class BusyError(StoreError):
    """The store could not be written now; the same append may be tried again."""


class NotAStoreError(StoreError):
    """The place named is not a store, or one that this version cannot read."""

    exit_code = 2


class StarvedError(RlakeError, TimeoutError):
    """A bounded wait ended; the message says what was needed and what was there."""

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


@contextmanager
def as_store_error(what: str) -> Iterator[None]:
    """Turn what the table format raises into StoreError; our own errors stay as they are."""
    try:
        yield
    except RlakeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise StoreError(f"{what}: {reason(error)}; do it again") from error


_LIBRARY = re.compile(
    r"^(?:\w+: )?External error: (?:LanceError\(\w+\): )?(?:Generic \S+ error: )?"
)


def damaged(what: str, error: BaseException) -> StoreError:
    """Return the error for what cannot be read, as from a file that is gone or broken."""
    said = _LIBRARY.sub("", reason(error))
    return StoreError(f"cannot read {what}: {said}; `rlake doctor` says which files are damaged")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what the table format raises while it reads into StoreError; ours stay as they are."""
    try:
        yield
    except RlakeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise damaged(what, error) from error


def nearest(name: str, known: object) -> str:
    """Return `; did you mean `x`?` for the closest known name, or what is known when none is close.

    >>> nearest("rewrad", ["reward", "task_id"])
    '; did you mean `reward`?'
    >>> nearest("zzz", ["reward", "task_id"])
    '; known are `reward`, `task_id`'
    """
    names = sorted(str(k) for k in known)  # type: ignore[attr-defined]
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean `{close[0]}`?"
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
    r"NoSuchBucket": "there is no such bucket ({})",
}
_LONGEST = 300
_BUSY = ("conflict", "slowdown", "slow down", "throttl", " 500 ", " 502 ", " 503 ", " 504 ",
         "timed out", "timeout", "connection")  # fmt: skip


def write_error(name: str, error: Exception) -> StoreError:
    """Turn what the table format says of a write to a table into our kind of error."""
    said = f"cannot write to `{name}`: {reason(error)}"
    if any(word in str(error).lower() for word in _BUSY):
        return BusyError(f"{said}; try it again, what is stored already is left out")
    return StoreError(f"{said}; nothing was stored")


def reason(error: BaseException) -> str:
    """Return the first sentence of what a library says, without places in its source."""
    for pattern, message in _S3_SAYS.items():
        if found := re.search(pattern, str(error)):
            return message.format(found[0])
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = text.split(", /")[0].split(" at /")[0].strip().rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
