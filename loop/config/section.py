"""What all parts of the tree share: unknown keys and lossy numbers are refused."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_bool(value: Any) -> Any:
    """Refuse true where a number is wanted; text that is a number stays, as YAML reads `1e-3`."""
    if isinstance(value, bool):
        raise ValueError(f"input should be a number, got {value}")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Share = Annotated[Float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the tree; unknown keys are errors, and values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
