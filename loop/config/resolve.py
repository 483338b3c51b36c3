"""Names in a configuration become functions: ours by name, others as `package.module:function`."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ...operators.import_path import import_from
from ...store.errors import ConfigError, nearest


def function(name: str | Callable[..., Any], home: ModuleType, what: str) -> Callable[..., Any]:
    """Return the function `name` of the module `home`, or of `package.module:function`.

    A function is returned as it is.

    Raises ConfigError, with the nearest known name, when there is none; `what` is what was wanted.
    """
    if not isinstance(name, str) or ":" in name or name.startswith("."):
        found = import_from(name, what)
    else:
        known = public_functions(home)
        if name not in known:
            raise ConfigError(f"there is no {what} `{name}`{nearest(name, known)}")
        found = known[name]
    if not callable(found):
        raise ConfigError(f"the {what} `{name}` must be a function, got {type(found).__name__}")
    return found


def call(
    spec: str | Mapping[str, Mapping[str, Any]], home: ModuleType, what: str, *given: object
) -> Any:
    """Call the function that `name` or `{name: {parameter: value}}` names, on what it is given."""
    if not isinstance(spec, str) and len(spec) != 1:
        raise ConfigError(f"expected one {what}, got {list(spec)}")
    name, params = (spec, {}) if isinstance(spec, str) else next(iter(spec.items()))
    try:
        return function(name, home, what)(*given, **(params or {}))
    except TypeError as error:
        raise ConfigError(f"the {what} `{name}` cannot be called so: {error}") from error


def public_functions(home: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions that a module lists in `__all__`, or defines and does not hide."""
    listed = getattr(home, "__all__", None)
    return {
        k: v
        for k, v in vars(home).items()
        if callable(v)
        and not isinstance(v, type)
        and (k in listed if listed is not None else _is_own(k, v, home))
    }


def _is_own(name: str, value: Any, home: ModuleType) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", None) == home.__name__
