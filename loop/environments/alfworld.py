"""ALFWorld (arXiv:2010.03768): household tasks, from its own game files, played by TextWorld."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...store.errors import ConfigError, JobError, missing_extra
from ...store.records import Task
from .text_game import Scene, TextGameEnvironment
from .textworld import package, taking_turns

_KEY = "alfworld"
_GAME = "game.tw-pddl"
_PROMPT = "You are in a house. Carry out the task; answer with one command."
_SPLITS = {"train": "train", "valid_seen": "eval", "valid_unseen": "eval"}
"""The folders of ALFWorld's games, and the splits of their tasks."""
_BAR = "_bar_"
"""Stands between the parts of an object's name: its kind and three coordinates."""


def alfworld(*, folder: str | None = None, **parameters: Any) -> TextGameEnvironment:
    """A household task of ALFWorld, as `{alfworld: {folder: DATA, max_steps: 50}}`.

    The task's metadata have `alfworld`: `{game: path}`, relative to `folder` (None: ALFWORLD_DATA,
    or `alfworld` in the user's cache, where `alfworld-download` puts them). `games` makes such
    tasks. The other parameters are those of `TextGameEnvironment`; the score is 1 when the task is
    done. Its expert is a planner, which knows the whole house.
    """
    return TextGameEnvironment(_AlfworldGame(_folder(folder)), **parameters)


def games(
    *,
    folder: str | None = None,
    train: int | None = None,
    held_out: int | None = None,
    splits: Mapping[str, str] | None = None,
    prompt: str = _PROMPT,
    taskset: str = "alfworld",
) -> Iterator[Task]:
    """Yield a task for each game below `folder` that ALFWorld plays, in the order of their paths.

    `splits` are the folders of games with the split of their tasks (None: `train`, and `valid_seen`
    and `valid_unseen` for `eval`). `train` and `held_out` limit how many there are of each split.
    The metadata have the `folder` of the game, and its `kind`, such as `pick_and_place_simple`.
    Raises ConfigError if there are none.
    """
    home, limits = _folder(folder), {"train": train, "eval": held_out}
    made: Counter[str] = Counter()
    for name, split in (splits or _SPLITS).items():
        for path in sorted(home.glob(f"**/{name}/**/{_GAME}")):
            most = limits.get(split)
            if most is not None and made[split] >= most:
                break
            game = path.relative_to(home).as_posix()
            # as in ALFWorld, whose engine does not have these two kinds
            if "movable" in game or "Sliced" in game or not _game(path).get("solvable"):
                continue
            made[split] += 1
            kind = path.parent.parent.name.partition("-")[0]
            about = {_KEY: {"game": game}, "folder": name, "kind": kind}
            yield Task.ask(prompt, taskset=taskset, split=split, metadata=about)
    if not made:
        raise ConfigError(
            f"`{home}` has no game of ALFWorld (`{'|'.join(splits or _SPLITS)}/.../{_GAME}`); get "
            "them with `pip install alfworld` and `alfworld-download`, and name their folder in "
            "`folder` or ALFWORLD_DATA"
        )


def has_games(folder: str | None = None) -> bool:
    """Return whether ALFWorld's data are at hand."""
    return any(_folder(folder).glob(f"**/{_GAME}"))


class _AlfworldGame:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._env: Any = None

    def begin(self, task: Task) -> Scene:
        made = (task.metadata or {}).get(_KEY)
        if not isinstance(made, Mapping) or not isinstance(made.get("game"), str):
            raise JobError(f"task {task.task_id} has no game in `{_KEY}` of its metadata")
        path = self._folder / made["game"]
        if not path.is_file():
            raise JobError(
                f"the game of task {task.task_id} is not at `{path}`; name the folder of "
                "ALFWorld's data in `folder` or ALFWORLD_DATA"
            )
        self.close()
        # not `textworld.start`, which leaves the file open
        kind, game = package().envs.PddlEnv, _game(path)
        with taking_turns():
            try:
                self._env = kind()
                self._env.load(game)
            except ImportError as error:
                raise missing_extra("fast_downward", "textworld") from error
            except (Exception, SystemExit) as error:  # the planner's parser exits on some faults
                raise JobError(f"`{path}` cannot be played as a game: {error!r:.200}") from error
            _rename(self._env)
            state = self._env.reset()
        return _scene(state, is_done=False)

    def act(self, command: str) -> Scene:
        assert self._env is not None, "a game begins with `begin`"
        with taking_turns():
            state, _, is_done = self._env.step(command)
        return _scene(state, is_done=is_done)

    def hint(self) -> str | None:
        world = self._env
        with taking_turns():
            plan = world._pddl_state.replan(world._entity_infos)
        return next(iter(plan or ()), None)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _folder(folder: str | None) -> Path:
    given = folder or os.environ.get("ALFWORLD_DATA") or Path.home() / ".cache" / "alfworld"
    return Path(given).expanduser()


def _game(path: Path) -> Mapping[str, Any]:
    with suppress(ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, Mapping):
            return found
    raise ConfigError(f"`{path}` is not JSON, as a game is; download it again")


def _rename(world: Any) -> None:
    """Give objects the names of ALFWorld, such as `mug 1`, in place of those with coordinates."""
    numbers: Counter[str] = Counter()
    # ALFWorld counts from the last one down
    for name in sorted(world._entity_infos, reverse=True):
        kind, bar, _ = name.lower().partition(_BAR)
        if bar:
            kind += "basin" if "basin" in name.lower() else ""
            numbers[kind] += 1
            world._entity_infos[name].name = f"{kind} {numbers[kind]}"


def _scene(state: Mapping[str, Any], *, is_done: bool) -> Scene:
    lines = (line.strip() for line in str(state["feedback"]).splitlines())
    return Scene(
        text="\n".join(line for line in lines if line),
        commands=tuple(state["admissible_commands"]),
        score=float(state["won"]),
        is_done=bool(is_done or state["lost"]),
    )
