"""The interface of reward functions, for live runs, pipelines and rescoring."""

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import TypeAdapter

from ..store.errors import OperatorError, nearest
from ..store.records import Experience, Task
from .parameters import STRICT, checked

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Verdict:
    """A reward with the reason for it, kept as `detail` of the row."""

    value: float | None
    detail: str | None = None
    error: str | None = field(default=None, repr=False)
    """Why a judge of groups failed on this rollout; the group is judged again later."""


Said = float | Verdict | None
"""The result of a reward function: None means that it does not apply."""

Reward = Callable[[Task, Experience], Said | Awaitable[Said]]
"""A reward function, plain or `async`: live in the explorer, later over stored rows."""

GroupReward = Callable[[Task, Sequence[Experience]], Sequence[Said] | Awaitable[Sequence[Said]]]
"""A reward function that judges all rollouts of a group at once, under `@of_group`."""

Spec = str | Mapping[str, Mapping[str, Any] | None]
"""A reward in YAML: `name`, or `{name: {parameter: value}}`."""


def of_group(function: F) -> F:
    """Mark a reward function that gets all rollouts of a group at once.

    >>> @of_group
    ... def share_of_best(task, experiences):
    ...     return [1.0 / len(experiences)] * len(experiences)
    >>> looks_at(share_of_best)
    'group'
    """
    function.__dict__["looks_at"] = "group"
    return function


def looks_at(function: Callable[..., Any]) -> Literal["row", "group"]:
    """Return what a reward function gets: one rollout (`row`), or those of a group (`group`)."""
    inner = function.func if isinstance(function, partial) else function
    return getattr(inner, "looks_at", "row")


def with_parameters(
    name: str,
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    what: str = "reward",
    others: Collection[str] = (),
) -> Callable[..., Any]:
    """Return a reward function with its parameters set, except the first two.

    `what` is its name in messages; parameters in `others` may be missing, and are passed later.

    >>> def longer(task, experience, *, than: int):
    ...     return float(len(experience.response_text or "") > than)
    >>> with_parameters("longer", longer, {"than": 3}).keywords
    {'than': 3}

    Raises OperatorError for one that is unknown, missing, or of another type.
    """
    known = parameters(function)
    for one in given:
        if known is not None and one not in known:
            message = nearest(one, known) if known else "; it has no parameters"
            raise OperatorError(f"the {what} `{name}` has no parameter `{one}`{message}")
    needed = [n for n, p in (known or {}).items() if p.default is p.empty]
    if missing := [n for n in needed if n not in given and n not in others]:
        message = ", ".join(f"`{n}`" for n in missing)
        raise OperatorError(
            f"the {what} `{name}` needs {message}; write `{{{name}: {{{missing[0]}: ...}}}}`"
        )
    if not given:
        return function
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # annotations that are known to type checkers only
        hints = {}
    types = {key: TypeAdapter(hints.get(key, Any), config=STRICT) for key in given}
    values = {
        key: checked(types[key], value, f"`{key}` of the {what} `{name}`")
        for key, value in given.items()
    }
    return partial(function, **values)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a function after its first two; None if it takes any."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in found):
        return None
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = [p for p in found if p not in positional[:2] and p.kind is not p.VAR_POSITIONAL]
    return {p.name: p for p in rest}
