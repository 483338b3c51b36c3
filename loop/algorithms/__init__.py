"""Algorithms: one file each. A new one is a new file here, or any `package.module:Class`."""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ...store.errors import ConfigError, nearest
from .algorithm import Algorithm, Loss, aggregate

__all__ = ["Algorithm", "Loss", "aggregate", "names", "resolve"]


def names() -> list[str]:
    """Return the names of the packaged algorithms: those of their files."""
    return sorted(m.name for m in iter_modules(__path__) if m.name != "algorithm")


def resolve(spec: str | Mapping[str, Mapping[str, Any]]) -> Algorithm:
    """Build the algorithm that a configuration names; parameters not given keep their defaults.

    Raises ConfigError for a name or a parameter that does not exist.
    """
    if not isinstance(spec, str) and len(spec) != 1:
        raise ConfigError(f"`algorithm` names {len(spec)} algorithms, expected one: {list(spec)}")
    name, params = (spec, {}) if isinstance(spec, str) else next(iter(spec.items()))
    kind = _class(name)
    known = [f.name for f in fields(kind)]
    for key in params or {}:
        if key not in known:
            raise ConfigError(f"`{name}` has no parameter `{key}`{nearest(key, known)}")
    return kind(**(params or {}))


def _class(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not attribute:
        if name not in names():
            raise ConfigError(f"there is no algorithm `{name}`{nearest(name, names())}")
        found = vars(import_module(f".{name}", __name__))
        return next(
            v for v in found.values() if isinstance(v, type) and v.__module__.endswith(f".{name}")
        )
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"there is no algorithm `{name}`: {error}") from error
