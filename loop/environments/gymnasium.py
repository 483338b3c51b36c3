"""Gymnasium environments with discrete or text actions, with observations shown as text."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ...operators.import_path import find_function
from ...store.errors import ConfigError, JobError, missing_extra
from ...store.ids import content_id
from ...store.records import Message, Task
from . import rendering
from .environment import Shown, Step

if TYPE_CHECKING:
    from gymnasium import Env, Space
    from gymnasium.envs.registration import EnvSpec

ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Action names of well-known environments, in the order of their numbers."""
REFUSED = "`{said}` is not an action; answer with one of: {actions}\n"
_LONGEST_SAID = 60
T = TypeVar("T")
Renderer = Callable[["Env[Any, Any]", Any], str]
"""Shows an observation of an environment as text."""


class GymnasiumEnvironment:
    """One episode of a Gymnasium environment; its observations are shown as text.

    The seed is `seed` of the task's metadata, or else derived from the task's id.
    """

    def __init__(
        self,
        id: str,
        *,
        options: Mapping[str, Any] | None = None,
        from_task: Sequence[str] = (),
        actions: Sequence[str] | None = None,
        show: "str | Renderer | None" = None,
        shows_first: bool = True,
        refused: str = REFUSED,
        refused_reward: float = 0.0,
        most_refused: int = 10,
        max_steps: int | None = None,
        in_thread: bool = False,
    ) -> None:
        """Take the arguments of `gymnasium.make`, and how its states and actions become text.

        `from_task` are keys of the task's metadata that are passed as `options` too. `actions` are
        names of the actions; their numbers are accepted as well. `show` is a function of
        `rendering`, `package.module:function`, or a function; None takes the environment's drawing,
        or the numbers when it has none. `shows_first` is false when the task's prompt already shows
        the first state. An answer that names no action is answered with `refused` and the last
        state; it earns `refused_reward` (set it below 0 when each step costs something), and the
        episode ends after `most_refused` of them. `in_thread` is for slow environments.
        """
        self._id, self._options, self._from_task = id, dict(options or {}), tuple(from_task)
        self._max_steps, self._in_thread = max_steps, in_thread
        self._names = None if actions is None else [str(name) for name in actions]
        self._show, self._shows_first = show, shows_first
        self._refused, self._most_refused = refused, most_refused
        self._refused_reward = float(refused_reward)
        self._env: Env[Any, Any] | None = None
        self._actions: list[str] | None = None
        self._text = ""
        self._num_refused = 0

    async def reset(self, task: Task) -> Shown:
        """Make the environment and reset it; return only the task if its prompt shows the state."""
        message = dict(task.metadata or {})
        missing = [key for key in self._from_task if key not in message]
        if missing:
            raise JobError(f"task {task.task_id} has no `{missing[0]}` in its metadata")
        options = {**self._options, **{key: message[key] for key in self._from_task}}
        await self.close()
        self._env = await self._run(lambda: self._made(options))
        self._actions = self._named(self._env.action_space)
        env, seed = self._env, int(message.get("seed", int(content_id(task.task_id, length=7), 16)))
        observation, _ = await self._run(lambda: env.reset(seed=seed))
        self._num_refused = 0
        self._text = self._shown(observation)
        return self._text if self._shows_first else list(task.messages)

    async def step(self, answer: Message) -> Step:
        """Take the action that the answer names, or refuse the answer."""
        env = self._env
        assert env is not None, "an episode begins with reset"
        said = str(answer.get("content") or "")
        action = said if self._actions is None else action_in(said, self._actions)
        if action is None:
            return self._refuse(said)
        observation, reward, terminated, truncated, _ = await self._run(lambda: env.step(action))
        self._text = self._shown(observation)
        metrics = {"environment/truncated": 1.0} if truncated else {}
        done = bool(terminated or truncated)
        return Step(shown=self._text, reward=float(reward), is_done=done, metrics=metrics)

    async def close(self) -> None:
        """Close the environment, if there is one."""
        env, self._env = self._env, None  # before awaiting, so that it is closed only once
        if env is not None:
            await self._run(env.close)

    def _refuse(self, said: str) -> Step:
        self._num_refused += 1
        text = self._refused.format(
            said=said.strip()[:_LONGEST_SAID], actions=", ".join(self._actions or ())
        )
        return Step(
            shown=text + self._text,
            reward=self._refused_reward,
            is_done=self._num_refused >= self._most_refused,
            metrics={"environment/invalid": 1.0},
        )

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work) if self._in_thread else work()

    def _made(self, options: Mapping[str, Any]) -> "Env[Any, Any]":
        try:
            import gymnasium
        except ImportError as error:
            raise missing_extra("gymnasium", "environments") from error
        try:
            spec = gymnasium.spec(self._id)
        except gymnasium.error.Error as error:
            raise ConfigError(f"unknown Gymnasium environment `{self._id}`: {error}") from error
        self._show = self._show or ("drawing" if _draws(spec) else "numbers")
        drawn = {"render_mode": "ansi"} if self._show == "drawing" else {}
        env = gymnasium.make(spec, **{**drawn, **options})
        if self._max_steps is None:
            return env
        return gymnasium.wrappers.TimeLimit(env, self._max_steps)

    def _named(self, space: "Space[Any]") -> list[str] | None:
        """Return the names of the actions, or None if any text is an action."""
        from gymnasium.spaces import Discrete, Text

        if isinstance(space, Text):
            return None
        if not isinstance(space, Discrete):
            raise ConfigError(
                f"`{self._id}` has actions of {space}, expected Discrete or Text; wrap it"
            )
        names = self._names or ACTIONS.get(self._kind) or [str(i) for i in range(int(space.n))]
        if len(names) != space.n:
            raise ConfigError(f"`{self._id}` has {space.n} actions, got {len(names)} names")
        return list(names)

    @property
    def _kind(self) -> str:
        return self._id.rpartition("/")[2].rpartition("-v")[0]

    def _shown(self, observation: Any) -> str:
        render = find_function(self._show or "numbers", rendering, "renderer")
        return str(render(self._env, observation))


def gymnasium(id: str, **parameters: Any) -> GymnasiumEnvironment:
    """A Gymnasium environment by its id, as `{gymnasium: {id: Taxi-v4, max_steps: 50}}`."""
    return GymnasiumEnvironment(id, **parameters)


def _draws(spec: "EnvSpec") -> bool:
    """Return whether an environment can draw itself as text, without making it."""
    from gymnasium.envs.registration import load_env_creator

    point = spec.entry_point
    made = load_env_creator(point) if isinstance(point, str) else point
    return "ansi" in getattr(made, "metadata", {}).get("render_modes", ())


_TAGGED = re.compile(r"<(action|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL | re.IGNORECASE)


def action_in(text: str, names: Sequence[str]) -> int | None:
    """Return the number of the action that an answer names, or None.

    The text of the last `<action>` counts, or else the whole answer. It is a name, an unambiguous
    prefix of one, or a number. In a longer text the last name counts.

    >>> names = ["left", "down", "right", "up"]
    >>> [action_in(said, names) for said in ("Up", "r", "2", "Not left. I go down!", "north")]
    [3, 2, 2, 1, None]
    >>> action_in("left or <action>right</action>? right", names)
    2
    """
    tagged = _TAGGED.findall(text)
    said = (tagged[-1][1] if tagged else text).strip().lower().rstrip(".!")
    known = [name.lower() for name in names]
    if said in known:
        return known.index(said)
    # `int` refuses texts of thousands of digits
    if said.isascii() and said.isdigit() and len(said) < 10:
        return int(said) if int(said) < len(known) else None
    begun = [i for i, name in enumerate(known) if said and name.startswith(said)]
    if len(begun) == 1:
        return begun[0]
    found = [
        (place.start(), len(name), i)
        for i, name in enumerate(known)
        for place in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", said)
    ]
    return max(found)[2] if found else None
