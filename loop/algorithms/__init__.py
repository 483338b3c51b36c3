"""Algorithms: one file each. A new one is a new file here, or any `package.module:Class`."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ...operators.import_path import import_from, taken_apart
from ...operators.parameters import keys_of
from ...store.errors import ConfigError, first_invalid, nearest
from ..losses import Algorithm, Loss, aggregate

__all__ = ["Algorithm", "Loss", "aggregate", "kind_of", "names", "resolve"]


def names() -> list[str]:
    """Return the names of the packaged algorithms: those of their files."""
    return sorted(m.name for m in iter_modules(__path__))


def resolve(spec: str | Mapping[str, Mapping[str, Any]]) -> Algorithm:
    """Build the algorithm that a configuration names; parameters not given keep their defaults.

    Parameters are checked against the annotations of the algorithm's fields. Raises ConfigError for
    a name or a parameter that does not exist, and for a value that does not fit.
    """
    name, params = taken_apart(spec, "`algorithm`")
    kind = kind_of(name)
    made = build(kind, name, params)
    if getattr(made, "aggregation", "").endswith("-norm") and getattr(made, "norm", None) is None:
        raise ConfigError(f"`{name}` with aggregation `{made.aggregation}` needs a `norm` above 0")
    return made


def build(kind: Any, name: str, params: Mapping[str, Any]) -> Any:
    """Build a dataclass from parameters by their keys. Raises ConfigError, which has the `name`."""
    keys = keys_of(kind)
    known = {keys[f.name]: f for f in fields(kind) if f.init}
    for key in params:
        if key not in known:
            raise ConfigError(f"`{name}` has no parameter `{key}`{nearest(key, known)}")
    for key, field in known.items():
        if key not in params and field.default is field.default_factory is MISSING:
            raise ConfigError(f"parameter `{key}` of `{name}` is missing; it has no default")
    # With extras, because the limits of a parameter stand in its annotation.
    types = get_type_hints(kind, include_extras=True)
    values = {
        known[k].name: _value(v, types[known[k].name], f"parameter `{k}` of `{name}`")
        for k, v in params.items()
    }
    return kind(**values)


def _value(value: Any, kind: Any, what: str) -> Any:
    """Return a value of the annotated type; text may stand for a number, `true` may not."""
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{what}: input should be its own parameters, got {value!r}")
        return build(kind, what.removeprefix("parameter ").strip("`"), value)
    config = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    try:
        made = TypeAdapter(kind, config=config).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{what}: {first_invalid(error)[1]}, got {value!r}") from error
    if isinstance(value, bool) and not isinstance(made, bool):
        raise ConfigError(f"{what}: input should be a number, got {value!r}")
    return made


def kind_of(name: str) -> Any:
    """Return the class of a packaged algorithm, found by its file's name, or of `module:Class`."""
    if ":" not in name:
        if name not in names():
            raise ConfigError(f"algorithm `{name}` does not exist{nearest(name, names())}")
        found = import_module(f".{name}", __name__)
        # The class that the file defines, not those that it imports.
        own = (v for v in vars(found).values() if isinstance(v, type))
        return next(v for v in own if v.__module__ == found.__name__)
    found = import_from(name, "algorithm", form="Class")
    if not (isinstance(found, type) and issubclass(found, Algorithm) and is_dataclass(found)):
        raise ConfigError(
            f"the algorithm `{name}` must be a dataclass that extends "
            f"`rlake.loop.losses:Algorithm`, got {found!r}"
        )
    return found
