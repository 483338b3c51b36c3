"""The parameters of an operator: checked against the annotations of its function."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ..store.errors import OperatorError, first_invalid, nearest

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
"""Numbers that parameters may be."""


@dataclass(frozen=True)
class Key:
    """In the annotation of a dataclass's field: its key in a configuration, if not its name."""

    name: str


def keys_of(kind: Any) -> dict[str, str]:
    """Return the keys of a dataclass's fields in a configuration, by the names of the fields."""
    hints = get_type_hints(kind, include_extras=True)
    own = {
        name: one.name
        for name, hint in hints.items()
        for one in getattr(hint, "__metadata__", ())
        if isinstance(one, Key)
    }
    return {one.name: own.get(one.name, one.name) for one in fields(kind) if one.init}


STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class Parameters:
    """What a function may be called with: names, types and defaults."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function, self._name = function, name
        self.signature = inspect.signature(function)

    @cached_property
    def _types(self) -> dict[str, TypeAdapter[Any]]:
        # at the first call, not at the decoration: only then all names in annotations are defined
        hints = get_type_hints(self._function, include_extras=True)
        return {
            name: TypeAdapter(hints.get(name, Any), config=STRICT)
            for name in self.signature.parameters
        }

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all parameters, defaults included.

        Raises OperatorError for one that is unknown, missing, or of another type.
        """
        known = self.signature.parameters
        for name in kwargs:
            if name not in known:
                what = nearest(name, known) if known else "; it has no parameters"
                raise OperatorError(f"`{self._name}` has no parameter `{name}`{what}")
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise OperatorError(f"`{self._name}` cannot be called so: {error}") from error
        bound.apply_defaults()
        return {
            name: checked(self._types[name], value, f"`{name}` of `{self._name}`")
            for name, value in bound.arguments.items()
        }


def checked(kind: TypeAdapter[Any], value: Any, what: str) -> Any:
    """Return a parameter's value; raises OperatorError, with `what` it is, for another type."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        raise OperatorError(
            f"parameter {what} got {value!r} ({type(value).__name__}): {first_invalid(error)[1]}"
        ) from None


def jsonable(operator: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as they are recorded: functions by their import path."""
    return {name: _plain(operator, name, value) for name, value in params.items()}


def _plain(operator: str, name: str, value: Any) -> Any:
    if inspect.isfunction(value):
        return f"{value.__module__}:{value.__qualname__}"
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        raise OperatorError(
            f"parameter `{name}` of `{operator}` is a {type(value).__name__}, expected numbers, "
            "text, lists, mappings or a function: what can be recorded"
        ) from None
