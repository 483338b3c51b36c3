"""Executors: where a pipeline's parts are treated."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ...store.errors import ConfigError, nearest
from .local import Local
from .ray import Ray

Executor = Local | Ray

_KINDS: Mapping[str, type[Local] | type[Ray]] = {"local": Local, "ray": Ray}


def executor_of(given: Executor | str | Mapping[str, Any]) -> Executor:
    """Return the executor that a name stands for, or a name with settings.

    >>> executor_of({"local": {"threads": 4}}).threads
    4

    Raises ConfigError for another name, and for settings that it has not.
    """
    if isinstance(given, Local | Ray):
        return given
    name, settings = given, {}
    if isinstance(given, Mapping) and len(given) == 1:
        [(name, settings)] = given.items()
    if not isinstance(name, str) or not isinstance(settings, Mapping | None):
        raise ConfigError(
            f"`executor` is `local`, `ray`, or one of them with settings, got {given!r}"
        )
    if name not in _KINDS:
        raise ConfigError(f"there is no executor `{name}`{nearest(name, _KINDS)}")
    known = _KINDS[name].__dataclass_fields__
    for key in settings or ():
        if key not in known:
            raise ConfigError(f"executor `{name}` has no `{key}`{nearest(str(key), known)}")
    try:
        return _KINDS[name](**(settings or {}))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(["executor", name, *map(str, first["loc"])])
        raise ConfigError(f"`{place}` got {first['input']!r}: {first['msg'].lower()}") from error
