"""Experiment trackers: one file each, with one class; others as `package.module:Class`."""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from pydantic import ValidationError

from ....operators.import_path import import_from, taken_apart
from ....store.errors import ConfigError, first_invalid, missing_extra, nearest

__all__ = ["names", "resolve"]


def names() -> list[str]:
    """Return the names of the packaged trackers: those of their files."""
    return sorted(m.name for m in iter_modules(__path__))


def resolve(spec: str | Mapping[str, Mapping[str, Any] | None]) -> tuple[str, Any]:
    """Return the name and the object of the tracker that a configuration names.

    Raises ConfigError for a name or a parameter that does not exist, MissingExtraError when the
    tracker is not installed.
    """
    name, params = taken_apart(spec, "a tracker")
    kind = _class(name)
    try:
        return name.rpartition(":")[2], kind(**params)
    except ValidationError as error:
        where, message, value = first_invalid(error)
        known = [field.name for field in fields(kind) if field.init]
        what = f"has no parameter `{where}`{nearest(where, known)}"
        if where.partition(".")[0] in known:
            what = f"parameter `{where}`: {message}, got {value!r}"
        raise ConfigError(f"the tracker `{name}` {what}") from error
    except TypeError as error:
        raise ConfigError(f"the tracker `{name}` cannot be made so: {error}") from error


def _class(name: str) -> Any:
    if ":" in name:
        return import_from(name, "tracker", form="Class")
    if name not in names():
        raise ConfigError(f"tracker `{name}` does not exist{nearest(name, names())}")
    if find_spec(name) is None:
        raise missing_extra(name, "trackers")
    found = vars(import_module(f".{name}", __name__))
    return next(
        v for v in found.values() if isinstance(v, type) and v.__module__.endswith(f".{name}")
    )
