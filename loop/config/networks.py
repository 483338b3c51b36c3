"""The networks beside the policy, and what of the policy is trained."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from .base import Float, Int, Section, Share


class LoraConfig(Section):
    """A low-rank adapter (arXiv:2106.09685): only it is trained, checkpointed and published."""

    rank: Int = Field(default=32, ge=1)
    """Width of the adapter in each layer."""
    alpha: Float = Field(default=32.0, gt=0)
    """What the adapter adds is multiplied with alpha / rank."""
    dropout: Share = 0.0
    """Share of the adapter's inputs that are left out in training."""
    targets: tuple[str, ...] | None = None
    """Names of layers, or their ends, such as `q_proj`; None: all linear layers but the last."""


class CriticConfig(Section):
    """The network that says how much reward is still to come, for algorithms that need one."""

    path: str | None = None
    """Folder of the model that it starts from; None: what the policy starts from."""
    learning_rate: Float | None = Field(default=None, gt=0)
    """None: the policy's."""
    warmup_steps: Int = Field(default=0, ge=0)
    """Training steps at the start in which only the critic learns."""


def _expressions(given: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in given:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`{pattern}` is no regular expression: {error}") from error
    return given


Patterns = Annotated[tuple[str, ...], AfterValidator(_expressions)]
"""Regular expressions, each looked for anywhere in a name."""
