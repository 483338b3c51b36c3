"""TextWorld (arXiv:1806.11532): text adventures that its maker makes, or that are at hand."""

import json
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...store.errors import ConfigError, JobError, missing_extra, nearest
from ...store.ids import content_id
from ...store.records import Task
from .text_game import Scene, TextGameEnvironment

_KEY = "textworld"
_PROMPT = "You are in a text adventure. Answer with one command."
_PATIENCE = 100
"""Consecutive games that are won as an earlier one, after which `games` gives up."""
_STATUS = re.compile(r"^>\s*-=.*=-\S*$|^>$")
"""The line above a game's window, which its output repeats."""
_LOCK = threading.Lock()
"""The grammars and the parser of TextWorld are module state, which threads must not share."""


def textworld(*, folder: str | None = None, **parameters: Any) -> TextGameEnvironment:
    """A text adventure of TextWorld, as `{textworld: {show: [text, commands], max_steps: 50}}`.

    The task's metadata have `textworld`: `{challenge, settings, seed}`, which `games` writes, or
    `{file: a game that TextWorld made}`. Games are made when they are first played and kept in
    `folder` (None: `rlake/textworld` in the user's cache). The other parameters are those of
    `TextGameEnvironment`; the score is the share of the game's points.
    """
    return TextGameEnvironment(_TextWorldGame(folder), **parameters)


def games(
    *,
    challenge: str = "tw-coin_collector",
    settings: Mapping[str, Any] | None = None,
    train: int = 30,
    held_out: int = 20,
    seed: int = 0,
    prompt: str = _PROMPT,
    folder: str | None = None,
    taskset: str = "textworld",
) -> Iterator[Task]:
    """Yield games that are each won by other commands; `held_out` of them have the split `eval`.

    `settings` are those of TextWorld's `challenge`, such as `{level: 5}`. A game takes about a
    second to make. Raises ConfigError for settings that the challenge refuses, or that have too few
    different games.
    """
    known: set[str] = set()
    missed = 0
    while len(known) < train + held_out:
        made = {"challenge": challenge, "settings": dict(settings or {"level": 5}), "seed": seed}
        seed += 1
        won_by = _walkthrough(_compiled(made, _folder(folder)))
        missed = missed + 1 if won_by in known else 0
        if missed == _PATIENCE:
            raise ConfigError(
                f"only {len(known)} of {train + held_out} games of `{challenge}` differ in how "
                "they are won; ask for fewer, or for a higher level"
            )
        if missed:
            continue
        known.add(won_by)
        split = "eval" if len(known) <= held_out else "train"
        yield Task.ask(prompt, taskset=taskset, split=split, metadata={_KEY: made})


class _TextWorldGame:
    def __init__(self, folder: str | None) -> None:
        self._folder = _folder(folder)
        self._env: Any = None
        self._state: Any = None

    def begin(self, task: Task) -> Scene:
        made = (task.metadata or {}).get(_KEY)
        if not isinstance(made, Mapping):
            raise JobError(f"task {task.task_id} has no `{_KEY}` in its metadata; see `games`")
        text = package()
        self.close()
        path = Path(made["file"]).expanduser() if "file" in made else _compiled(made, self._folder)
        shown = {"admissible_commands", "policy_commands", "score", "max_score", "won", "objective"}
        infos = text.EnvInfos(**dict.fromkeys(shown | {"description", "feedback", "lost"}, True))
        with taking_turns():
            try:
                self._env = text.start(str(path), infos)
            except OSError as error:
                raise JobError(f"task {task.task_id} cannot be played: {error}") from error
            state = self._state = self._env.reset()
        return self._scene(f"{state['objective']}\n\n{state['description']}", is_done=False)

    def act(self, command: str) -> Scene:
        assert self._env is not None, "a game begins with `begin`"
        with taking_turns():
            self._state, _, is_done = self._env.step(command)
        return self._scene(self._state["feedback"], is_done=is_done)

    def hint(self) -> str | None:
        return next(iter((self._state or {}).get("policy_commands") or ()), None)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _scene(self, text: str, *, is_done: bool) -> Scene:
        state = self._state or {}
        score = (
            float(state["won"]) if not state["max_score"] else state["score"] / state["max_score"]
        )
        lines = (line.strip() for line in text.splitlines())
        return Scene(
            text="\n".join(line for line in lines if line and not _STATUS.match(line)),
            commands=tuple(state["admissible_commands"]),
            score=1.0 if state["won"] else score,
            is_done=bool(is_done or state["lost"]),
        )


@contextmanager
def taking_turns() -> Iterator[None]:
    """Use TextWorld while no other thread does."""
    with _LOCK, warnings.catch_warnings():
        # Jericho knows the scores of a list of old games; those of TextWorld keep their own.
        warnings.filterwarnings("ignore", message="Game .* is not fully supported")
        yield


def package() -> Any:
    """Return TextWorld. Raises MissingExtraError without it."""
    try:
        import textworld.challenges  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_extra("textworld", "textworld") from error
    return textworld


def _folder(folder: str | None) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder or Path(cache, "rlake", "textworld")).expanduser()


def _walkthrough(game: Path) -> str:
    return str(json.loads(game.with_suffix(".json").read_text())["metadata"]["walkthrough"])


def _compiled(made: Mapping[str, Any], folder: Path) -> Path:
    """Return the file of a game, which is made unless the folder has it."""
    text = package()
    home = folder / content_id(text.__version__, dict(made))
    if not home.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder))
        try:
            _make(text, made, work / "game.z8")
            with suppress(OSError):  # another process was faster, and made the same
                work.rename(home)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return home / "game.z8"


def _make(text: Any, made: Mapping[str, Any], path: Path) -> None:
    name, settings, challenges = (
        made["challenge"],
        dict(made["settings"]),
        text.challenges.CHALLENGES,
    )
    if name not in challenges:
        raise ConfigError(f"TextWorld has no challenge `{name}`{nearest(name, challenges)}")
    options = text.GameOptions()
    options.seeds, options.path = int(made["seed"]), str(path)
    try:
        with taking_turns():
            game = challenges[name][1](settings, options)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"`{name}` cannot be made with {settings}: {error}") from error
    text.generator.compile_game(game, options)
