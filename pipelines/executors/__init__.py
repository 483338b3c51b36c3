"""Executors: where a pipeline's partitions are processed."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from ...store.errors import ConfigError, first_invalid, nearest
from .local import Local
from .ray import Ray

Executor = Local | Ray
T = TypeVar("T")

_KINDS: Mapping[str, type[Local] | type[Ray]] = {"local": Local, "ray": Ray}


def executor_of(given: Executor | str | Mapping[str, Any]) -> Executor:
    """Return the executor that a name stands for, or a name with settings.

    >>> executor_of({"local": {"threads": 4}}).threads
    4

    Raises ConfigError for an unknown name, and for unknown or invalid settings.
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
        raise ConfigError(f"unknown executor `{name}`{nearest(name, _KINDS)}")
    return build(_KINDS[name], settings or {}, f"executor.{name}")


def build(kind: type[T], given: Mapping[Any, Any], path: str) -> T:
    """Return a dataclass made of settings; raises ConfigError, with their `path`, for wrong ones.

    >>> build(Local, {"threads": 4}, "executor.local").threads
    4
    """
    known: Any = getattr(kind, "__dataclass_fields__")  # noqa: B009 - a type variable has none
    for key in given:
        if key not in known:
            raise ConfigError(f"`{path}` has no key `{key}`{nearest(str(key), known)}")
    try:
        return kind(**given)
    except ValidationError as error:
        place, message, value = first_invalid(error)
        raise ConfigError(f"`{path}.{place}` got {value!r}: {message}") from error
