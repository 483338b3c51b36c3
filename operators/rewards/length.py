"""Rewards that look at the length of the response."""

from typing import Annotated

from pydantic import Field

from ...store.errors import OperatorError
from ...store.records import Experience, Task


def overlong(
    task: Task,
    experience: Experience,
    *,
    max_tokens: Annotated[int, Field(gt=0)],
    cache: Annotated[int, Field(gt=0)],
) -> float | None:
    """From 0.0 to -1.0: the penalty of a response that comes near `max_tokens`, or passes it.

    0 up to max_tokens - cache tokens, then falling evenly to -1 at max_tokens; None without tokens.
    Only tokens that the policy sampled count. (Soft overlong punishment of DAPO,
    arXiv:2503.14476, equation 13; its weight is that of the reward.)

    >>> said = Experience(task_id="t", token_ids=[5] * 16, prompt_length=1)
    >>> overlong(Task.ask("2+2="), said, max_tokens=20, cache=10)
    -0.5
    """
    if cache > max_tokens:
        raise OperatorError(f"`cache` is {cache}, expected at most `max_tokens`, {max_tokens}")
    length = response_tokens(experience)
    if length is None:
        return None
    return -min(1.0, max(0.0, (length - (max_tokens - cache)) / cache))


def response_tokens(experience: Experience) -> int | None:
    """Return how many tokens the policy sampled, None for a row of text."""
    if experience.loss_mask is not None:
        return sum(experience.loss_mask)
    if experience.token_ids is None or experience.prompt_length is None:
        return None
    return len(experience.token_ids) - experience.prompt_length
