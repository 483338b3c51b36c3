"""Games that are played by text commands, for `textworld`, `alfworld` and `scienceworld`.

A game is four functions that may block; `TextGameEnvironment` makes an environment of it.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol, TypeVar

from ...store.errors import JobError
from ...store.records import Message, Task
from .environment import Step

Part = Literal["text", "commands"]
_TAGGED = re.compile(r"<(action|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL | re.IGNORECASE)
_LONGEST_SAID = 60
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a game says after a command."""

    text: str
    commands: Sequence[str] | None = None
    """The commands that are possible now; None: the game does not list them."""
    score: float
    """From 0 to 1, the game won."""
    is_done: bool
    is_refused: bool = False
    """Whether the game did not take the command."""


class Game(Protocol):
    """A game for one player. The calls of a game come one after another, from any thread."""

    def begin(self, task: Task) -> Scene:
        """Begin the game of a task."""
        ...

    def act(self, command: str) -> Scene:
        """Carry out a command."""
        ...

    def hint(self) -> str | None:
        """Return the command that an expert would give now, or None."""
        ...

    def close(self) -> None:
        """Free resources; called once, even before `begin`."""
        ...


class TextGameEnvironment:
    """One game; an answer is a command, and each step's reward is what the score rose by."""

    def __init__(
        self,
        game: Game,
        *,
        show: Sequence[Part] = ("text", "commands"),
        verbs: Sequence[str] = (),
        longest: int = 4000,
        max_steps: int = 50,
    ) -> None:
        """Show the game's text, cut to `longest` characters, the possible commands, or both.

        With `verbs`, only commands that begin with one of them are listed. A command that is not
        possible is refused without a step of the game, and counted as `environment/invalid`. The
        episode ends with the game, or after `max_steps` answers. `environment/won` is 1 for a game
        that was won.
        """
        self._game, self._show, self._verbs = game, tuple(show), tuple(verbs)
        self._longest, self._max_steps = longest, max_steps
        self._scene = Scene(text="", score=0.0, is_done=False)
        self._num_steps = 0
        # a cancelled call goes on in its thread, and the game must not be closed under it
        self._turn, self._is_closed = threading.Lock(), False

    async def reset(self, task: Task) -> str:
        """Begin the game of a task."""
        self._scene, self._num_steps = await self._play(self._game.begin, task), 0
        return self._shown(self._scene.text)

    async def step(self, answer: Message) -> Step:
        """Carry out the command of an answer, or refuse it."""
        self._num_steps += 1
        is_last = self._num_steps >= self._max_steps
        before, command = self._scene, command_in(str(answer.get("content") or ""))
        possible = {c.casefold(): c for c in before.commands or (command,)}
        if command.casefold() not in possible:
            shown = self._shown(f"`{command[:_LONGEST_SAID]}` is not possible here.")
            metrics = {"environment/invalid": 1.0}
            return Step(shown=shown, reward=0.0, is_done=is_last, metrics=metrics)
        self._scene = after = await self._play(self._game.act, possible[command.casefold()])
        return Step(
            shown=self._shown(after.text),
            reward=after.score - before.score,
            is_done=after.is_done or is_last,
            metrics=_metrics(after),
        )

    async def expert(self) -> Message | None:
        """Return the answer that an expert would give now."""
        command = await self._play(self._game.hint)
        return None if command is None else {"role": "assistant", "content": command}

    @property
    def commands(self) -> list[str]:
        """The possible commands, those of `verbs` alone."""
        return [c for c in self._scene.commands or () if c.startswith(self._verbs or "")]

    async def close(self) -> None:
        """Free the game, after a call that still runs."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._turn:
            self._is_closed = True
            self._game.close()

    async def _play(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        def in_turn() -> _T:
            with self._turn:
                if self._is_closed:
                    raise JobError("the game is closed, expected calls before that; make another")
                return call(*args, **kwargs)

        return await asyncio.to_thread(in_turn)

    def _shown(self, text: str) -> str:
        listed = "".join(f"{command}\n" for command in self.commands)
        parts = {"text": text[: self._longest].strip(), "commands": listed}
        return "\n\n".join(parts[part] for part in self._show if parts[part])


def _metrics(scene: Scene) -> dict[str, float]:
    if scene.is_refused:
        return {"environment/invalid": 1.0}
    return {"environment/won": 1.0} if scene.is_done and scene.score >= 1 else {}


def command_in(text: str) -> str:
    """Return the command of an answer: the last `<action>`, or else the last line with text.

    >>> command_in("The coin is here.\\n<action> take  coin </action>"), command_in("look\\n")
    ('take coin', 'look')
    """
    tagged = [found[1] for found in _TAGGED.findall(text)]
    lines = [line for line in (tagged[-1] if tagged else text).splitlines() if line.strip()]
    return " ".join(lines[-1].split()) if lines else ""
