"""Rewards of rollouts: resolve the configured functions and apply them to rows and groups."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from inspect import isawaitable
from math import isfinite
from typing import Any, NamedTuple, TypeVar, cast

from ...operators import rewards as reward_module
from ...operators.import_path import find_function
from ...operators.reward_protocol import GroupReward, Reward, looks_at, with_parameters
from ...operators.scoring import Judged, short, verdict, verdicts
from ...operators.user_errors import one_line
from ...store.errors import ConfigError, OperatorError
from ...store.records import Experience, Task
from .user_code import guarded

RewardSpec = str | Mapping[str, float | Mapping[str, Any] | None]
"""One reward by name, or several: their weights, or their parameters with `weight` and `offset`."""
T = TypeVar("T")
LONGEST = 2000
"""Most characters of a drop_reason."""


class RewardPart(NamedTuple):
    """A function of a run's reward, and how what it returns counts."""

    function: Reward
    weight: float = 1.0
    offset: float = 0.0

    def counted(self, value: float | None) -> float | None:
        """Return the part of the reward, which is NULL if the value is."""
        return None if value is None else self.weight * value + self.offset


def rewards_of(spec: RewardSpec) -> dict[str, RewardPart]:
    """Return the reward functions that a configuration names, with their weights and offsets.

    >>> rewards_of({"exact_match": {"weight": 2, "offset": -1}})["exact_match"].counted(0.0)
    -1.0

    Raises ConfigError for an unknown name, or parameters that do not fit.
    """
    specs = {spec: None} if isinstance(spec, str) else spec
    return {short(name): _reward(name, given) for name, given in specs.items()}


def _reward(name: str, given: float | Mapping[str, Any] | None) -> RewardPart:
    parameters = dict(given) if isinstance(given, Mapping) else {}
    if given is not None and not isinstance(given, Mapping):
        parameters = {"weight": given}
    scale = {"weight": parameters.pop("weight", 1.0), "offset": parameters.pop("offset", 0.0)}
    for what, number in scale.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number):
            raise ConfigError(f"the {what} of reward `{name}` must be a number, got {number!r}")
    found = find_function(name, reward_module, "reward")
    try:
        function = with_parameters(name, found, parameters)
        return RewardPart(function, float(scale["weight"]), float(scale["offset"]))
    except OperatorError as error:
        raise ConfigError(str(error)) from error


class Rewards:
    """The rewards of a job: functions of one rollout, and functions that compare a group."""

    def __init__(self, rewards: Mapping[str, RewardPart], *, seconds: float | None) -> None:
        """Take the parts of the reward; each function may take `seconds`."""
        self._parts, self._seconds = rewards, seconds
        found = {name: part.function for name, part in rewards.items()}
        self._of_group = {
            n: cast(GroupReward, r) for n, r in found.items() if looks_at(r) == "group"
        }
        self._of_row = {n: r for n, r in found.items() if n not in self._of_group}

    async def of_row(self, task: Task, row: Experience) -> Experience:
        """Add the rewards of one rollout."""
        begun = self.begin(task, row)
        return begun if isinstance(begun, Experience) else await begun

    def begin(self, task: Task, row: Experience) -> Experience | Coroutine[Any, Any, Experience]:
        """Call the functions of one rollout; return its row, to be awaited if one of them waits."""
        if not self._of_row:
            return row
        # no task for each: it would take longer than most functions
        asked = {n: self._asked(r, (task, row), verdict) for n, r in self._of_row.items()}
        if all(isinstance(one, tuple) for one in asked.values()):
            return self._with(row, cast("dict[str, _Outcome]", asked))
        return self._awaited_row(row, asked)

    async def _awaited_row(self, row: Experience, asked: Mapping[str, Any]) -> Experience:
        waiting = {n: one for n, one in asked.items() if not isinstance(one, tuple)}
        found = await asyncio.gather(*waiting.values())
        return self._with(row, {**asked, **dict(zip(waiting, found, strict=True))})

    async def of_group(self, task: Task, rows: Sequence[Experience]) -> list[Experience]:
        """Add the rewards that compare the rollouts of a group."""
        if not self._of_group or not rows:
            return list(rows)
        made: list[dict[str, _Outcome]] = [{} for _ in rows]
        for name, reward in self._of_group.items():
            asked = self._asked(reward, (task, rows), lambda value: verdicts(value, len(rows)))
            values, error = asked if isinstance(asked, tuple) else await asked
            for found, (one, own_error) in zip(
                made, values or [(None, None)] * len(rows), strict=True
            ):
                found[name] = one, own_error or error
        return [self._with(row, found) for row, found in zip(rows, made, strict=True)]

    def _asked(
        self, reward: Callable[..., Any], given: tuple[Any, Any], read: Callable[[Any], T]
    ) -> "_Found[T] | Coroutine[Any, Any, _Found[T]]":
        """Call a function; return what it found with its error, or a coroutine of them."""
        try:
            with guarded():
                made = reward(*given)
            return self._awaited(made, read) if isawaitable(made) else (read(made), None)
        except Exception as error:  # noqa: BLE001 - the boundary to users' code: the tokens are kept
            return None, one_line(error)

    async def _awaited(self, made: Awaitable[Any], read: Callable[[Any], T]) -> "_Found[T]":
        limit = asyncio.timeout(self._seconds)
        try:
            with guarded():
                async with limit:
                    value = await made
            return read(value), None
        except Exception as error:  # noqa: BLE001 - the boundary to users' code: the tokens are kept
            # `expired` tells our own limit from a TimeoutError that the function itself raises.
            is_late = limit.expired()
            return None, f"it took longer than {self._seconds} s" if is_late else one_line(error)

    def _with(self, row: Experience, made: Mapping[str, "_Outcome"]) -> Experience:
        """Add parts of the reward with their reasons; a failed reward drops the row."""
        parts: dict[str, float | None] = dict(row.rewards)
        failed = [row.drop_reason] if row.drop_reason else []
        reasons = {}
        for name, (judged, error) in made.items():
            value, reason = judged or (None, None)
            parts[name] = self._parts[name].counted(value)
            reasons |= {name: reason} if reason else {}
            failed += [f"reward `{name}` failed: {error}"] if error else []
        drop_reason = "; ".join(failed)[:LONGEST] or None
        metadata = {**(row.metadata or {}), "reward_details": reasons} if reasons else row.metadata
        return row.with_reward(parts).updated(drop_reason=drop_reason, metadata=metadata)


_Found = tuple[T | None, str | None]
"""What a function found, or the error."""
_Outcome = _Found[Judged]
"""A reward with its reason, or the error."""


async def judged(task: Task, row: Experience, reward: RewardSpec) -> Experience:
    """Return a row with its reward by the functions that `explorer.rewards` might name.

    Where one fails, the row has no reward, and a `drop_reason`.
    """
    return await Rewards(rewards_of(reward), seconds=None).of_row(task, row)
