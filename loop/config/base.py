"""Base classes of configuration sections: unknown keys and lossy numbers are refused."""

from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from ...store.errors import nearest


def _no_bool(value: Any) -> Any:
    # Text passes: YAML reads `1e-3` as text, and pydantic then makes a number of it.
    if isinstance(value, bool):
        raise ValueError(f"input should be a number, got {value}")
    return value


OperatorSpec = str | dict[str, dict[str, Any] | None]
"""An operator: `name`, or `{name: {parameter: value}}`."""
Int = Annotated[int, BeforeValidator(_no_bool), Field(ge=-(2**53), le=2**53)]
Float = Annotated[float, BeforeValidator(_no_bool)]


def _weight_or_parameters(value: Any) -> float | dict[str, Any]:
    # Not a union of pydantic's, whose error would name its branches.
    if isinstance(value, dict):
        return value
    number = _no_bool(value)
    try:
        weight = float(number)
    except (TypeError, ValueError, OverflowError):
        message = "input should be a valid number, or parameters"
        raise PydanticCustomError("weight", message) from None
    if not isfinite(weight):
        raise PydanticCustomError("weight", "input should be a finite number")
    return weight


WeightOrParameters = Annotated[float | dict[str, Any], PlainValidator(_weight_or_parameters)]
"""The weight of a reward, or its parameters, which may include `weight` and `offset`."""
NamedRewards = str | dict[str, WeightOrParameters]
"""A reward function, or several with their weights, or with their parameters."""
NamedWorkflow = str | dict[str, dict[str, Any] | None]
"""A workflow: `name`, or `{name: {parameter: value}}`."""
Share = Annotated[Float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the tree; unknown keys are errors, and values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Choice(Section):
    """A section that selects one of several parts: exactly one key is set, with its parameters."""

    noun: ClassVar[str]
    """Name of the thing that is chosen, for error messages."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """Accept a name alone, as in `sampler: uniform`: that choice with its defaults."""
        if not isinstance(value, str | Mapping):
            return value
        given = {value: {}} if isinstance(value, str) else dict(value)
        chosen = {name: part for name, part in given.items() if part is not None}
        unknown = [name for name in given if name not in cls.model_fields]
        if unknown:
            raise ValueError(
                f"{cls.noun} `{unknown[0]}` does not exist{nearest(unknown[0], cls.known())}"
            )
        if len(chosen) != 1:
            named = " and ".join(f"`{name}`" for name in chosen) or "none"
            raise ValueError(f"a {cls.noun} is one of {', '.join(cls.known())}, got {named}")
        return chosen

    @classmethod
    def known(cls) -> list[str]:
        """Return the names of all choices."""
        return list(cls.model_fields)
