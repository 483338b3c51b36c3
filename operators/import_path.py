"""Import paths `package.module:name`: what stands at them, and the error when nothing does."""

import re
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from ..store.errors import ConfigError, nearest

_PATH = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")


def import_from(
    given: str | Callable[..., Any],
    what: str,
    *,
    form: str = "function",
    error: type[Exception] = ConfigError,
) -> Any:
    """Import what stands at `package.module:name`; a Python callable is returned as it is.

    Raises `error`, which says that there is no such `what`; `form` is the form that it expects.

    >>> import_from("json:loads", "reward")('1'), import_from(len, "reward")("ab")
    (1, 2)
    """
    if not isinstance(given, str):
        return given
    missing = f"there is no {what} `{given}`"
    if not _PATH.fullmatch(given):
        raise error(f"{missing}; write `package.module:{form}`")
    try:
        return resolve_name(given)
    except AttributeError as failed:
        home = getattr(failed.obj, "__name__", given.partition(":")[0])
        near = nearest(str(failed.name), dir(failed.obj))
        raise error(f"{missing}: module `{home}` has no `{failed.name}`{near}") from failed
    except ImportError as failed:
        raise error(f"{missing}; it cannot be imported: {failed}") from failed
