"""Look up functions and classes by `package.module:name`, or by name in one of our modules."""

import re
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from types import ModuleType
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
    """Import the object at `package.module:name`; a Python callable is returned unchanged.

    Raises `error` if it does not exist; `what` it is and the expected `form` are in the message.

    >>> import_from("json:loads", "reward")('1'), import_from(len, "reward")("ab")
    (1, 2)
    """
    if not isinstance(given, str):
        return given
    missing = f"no {what} `{given}`"
    if not _PATH.fullmatch(given):
        raise error(f"{missing}; write `package.module:{form}`")
    try:
        return resolve_name(given)
    except AttributeError as failed:
        home = getattr(failed.obj, "__name__", given.partition(":")[0])
        near = nearest(str(failed.name), [n for n in dir(failed.obj) if not n.startswith("__")])
        raise error(f"{missing}: module `{home}` has no `{failed.name}`{near}") from failed
    except ImportError as failed:
        raise error(f"{missing}; it cannot be imported: {failed}") from failed


def find_function(
    name: str | Callable[..., Any],
    home: ModuleType | None,
    what: str,
    *,
    error: type[Exception] = ConfigError,
) -> Callable[..., Any]:
    """Return the function `package.module:function`, or the public function `name` of `home`.

    A function is returned unchanged. With `home` None, every name must be given in full. Raises
    `error` with the nearest known name if the function does not exist; `what` it is goes there too.

    >>> from rlake.operators import rewards
    >>> find_function("exact_match", rewards, "reward").__name__
    'exact_match'
    """
    # a leading dot is a mistake in a path, which `import_from` explains better than a list of names
    if home is None or not isinstance(name, str) or ":" in name or name.startswith("."):
        found = import_from(name, what, error=error)
    else:
        known = public_functions(home)
        if name not in known:
            near = nearest(name, known)
            others = "" if near.endswith("?") else "; write others as `package.module:function`"
            raise error(f"no {what} `{name}`{near}{others}")
        found = known[name]
    if not callable(found):
        raise error(f"the {what} `{name}` must be a function, got {type(found).__name__}")
    return found


def taken_apart(
    spec: Any, what: str, *, error: type[Exception] = ConfigError
) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters in `name`, or `{name: {parameter: value}}`.

    >>> taken_apart("keep", "it"), taken_apart({"keep": {"where": "reward > 0"}}, "it")
    (('keep', {}), ('keep', {'where': 'reward > 0'}))

    Raises `error` for anything else; `what` it is stands in the message.
    """
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise error(f"{what} is `name` or `{{name: {{parameter: value}}}}`, got {spec!r}")
    [(name, params)] = spec.items()
    if params is not None and not isinstance(params, Mapping):
        raise error(f"parameters of `{name}` must be `parameter: value`, got {params!r}")
    return str(name), dict(params or {})


def public_functions(home: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions that a module lists in `__all__`, or defines and does not hide."""
    listed = getattr(home, "__all__", None)
    return {
        k: v
        for k, v in vars(home).items()
        if callable(v)
        and not isinstance(v, type)
        and (k in listed if listed is not None else k[0] != "_" and v.__module__ == home.__name__)
    }
