"""Text files that are read whole: settings, recipes, labels."""

from pathlib import Path

from ..errors import InputError


def read_text(path: Path, *, what: str = "") -> str:
    """Return a file's text; raises InputError that says why not, and `what` the file is.

    >>> read_text(tmp / "none.yaml", what="the recipe ")
    Traceback (most recent call last):
    ...
    rlake.store.errors.InputError: cannot read the recipe `...none.yaml`: No such file or directory
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise InputError(f"cannot read {what}`{path}`: {message}") from error
