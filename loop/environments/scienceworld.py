"""ScienceWorld (arXiv:2203.07540): experiments of an elementary school, in a simulator on a JVM."""

import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...operators.concurrency import shared_semaphore
from ...operators.import_path import find_function
from ...store.errors import ConfigError, JobError, missing_extra, nearest
from ...store.records import Task
from .text_game import Scene, TextGameEnvironment

if TYPE_CHECKING:
    from asyncio import Semaphore

Simulator = Any
"""A `ScienceWorldEnv`; what runs on the JVM has no types here."""
_KEY = "scienceworld"
_LOCK = threading.Lock()
_idle: list[Simulator] = []
"""Simulators between two episodes: a JVM takes two seconds to start. It ends with the process."""


class ScienceWorldEnvironment(TextGameEnvironment):
    """One variation of a task, played in one of the simulators of this process."""

    def __init__(
        self,
        *,
        simulators: int = 2,
        expert: str = "gold",
        lists_commands: bool = False,
        **parameters: Any,
    ) -> None:
        """Take the parameters of TextGameEnvironment; by default only the text is shown.

        At most `simulators` JVMs run in a process, and further episodes wait for one. `expert` is
        `gold`, ScienceWorld's own solution, or a function that takes the task's description and
        returns commands. With `lists_commands` the simulator computes the possible commands in each
        step (hundreds, 0.1 s), and others are refused; without, it answers all commands.
        """
        game = _ScienceWorldGame(expert, lists_commands=lists_commands)
        super().__init__(game, **{"show": ("text",), **parameters})
        self._simulators = simulators
        self._permit: Semaphore | None = None

    async def reset(self, task: Task) -> str:
        """Wait for a simulator, and begin the variation of the task there."""
        if self._permit is None:
            permit = shared_semaphore("scienceworld", self._simulators)
            await permit.acquire()
            self._permit = permit
        return await super().reset(task)

    async def close(self) -> None:
        """Leave the simulator to others."""
        permit, self._permit = self._permit, None
        try:
            await super().close()
        finally:
            if permit is not None:
                permit.release()


def scienceworld(**parameters: Any) -> ScienceWorldEnvironment:
    """A task of ScienceWorld, as `{scienceworld: {simulators: 2, max_steps: 30}}`.

    The task's metadata have `scienceworld`: `{name, variation, simplifications}`, which
    `variations` writes. The reward is the share of ScienceWorld's score, from 0 to 1; what fails
    the task ends the episode and takes it away. Needs Java 8 or newer. An episode whose JVM ends is
    a rollout with an error, and the next one starts another JVM.
    """
    return ScienceWorldEnvironment(**parameters)


def variations(
    *,
    name: str = "find-non-living-thing",
    simplifications: str = "easy",
    train: int = 30,
    held_out: int = 20,
    taskset: str = "scienceworld",
) -> Iterator[Task]:
    """Yield variations of a task: `train` of its training set, `held_out` of its test set.

    The latter have the split `eval`. The prompt is the task's description. `simplifications` are
    ScienceWorld's, such as `teleportAction,openDoors`. Raises ConfigError for an unknown task,
    MissingExtraError without the package, and JobError without Java.
    """
    env = _taken()
    try:
        known = env.get_task_names()
        if name not in known:
            raise ConfigError(f"ScienceWorld has no task `{name}`{nearest(name, known)}")
        _load(env, name, 0, simplifications)
        chosen = [(number, "train") for number in env.get_variations_train()[:train]]
        chosen += [(number, "eval") for number in env.get_variations_test()[:held_out]]
        for number, split in chosen:
            _load(env, name, number, simplifications)
            about = {"name": name, "variation": number, "simplifications": simplifications}
            prompt = env.get_task_description()
            yield Task.ask(prompt, taskset=taskset, split=split, metadata={_KEY: about})
    finally:
        _idle.append(env)


class _ScienceWorldGame:
    def __init__(self, expert: str, *, lists_commands: bool) -> None:
        self._expert = None if expert == "gold" else find_function(expert, None, "expert")
        self._lists_commands = lists_commands
        self._env: Simulator | None = None
        self._about: dict[str, Any] = {}
        self._plan: list[str] | None = None
        self._num_acts = 0

    def begin(self, task: Task) -> Scene:
        about = (task.metadata or {}).get(_KEY)
        if not isinstance(about, Mapping):
            raise JobError(f"task {task.task_id} has no `{_KEY}` in its metadata; see `variations`")
        self.close()
        self._env, self._about = _taken(), dict(about)
        self._plan, self._num_acts = None, 0
        return self._begun(gold=False)

    def act(self, command: str) -> Scene:
        self._num_acts += 1
        with self._running() as env:
            return self._scene(env, env.server.step(command))

    def hint(self) -> str | None:
        if self._plan is None:
            # a solution comes with a new load of the world, which would undo what was done
            assert self._num_acts == 0, "the first hint comes before the first command"
            self._plan = self._planned()
        return self._plan.pop(0) if self._plan else None

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            _idle.append(env)

    def _planned(self) -> list[str]:
        with self._running() as env:
            if self._expert is not None:
                return list(self._expert(env.get_task_description()))
        self._begun(gold=True)
        with self._running() as env:
            return env.get_gold_action_sequence()

    def _begun(self, *, gold: bool) -> Scene:
        with self._running() as env:
            _load(env, **self._about, gold=gold)
            # some of the score is there from the beginning, and counts with the first command
            return replace(self._scene(env, env.server.step("look around")), score=0.0)

    def _scene(self, env: Simulator, text: str) -> Scene:
        score, is_done = float(env.server.getScore()), bool(env.server.getCompleted())
        listed = self._lists_commands and not is_done
        return Scene(
            text=text,
            commands=env.get_valid_action_object_combinations() if listed else None,
            score=max(0.0, score),
            is_done=is_done or score < 0,
        )

    @contextmanager
    def _running(self) -> Iterator[Simulator]:
        from py4j.protocol import Py4JError

        env = self._env
        assert env is not None, "a game begins with `begin`"
        try:
            yield env
        except Py4JError as error:
            self._env = None
            _end(env)
            raise JobError(
                f"the JVM of ScienceWorld failed: {str(error).splitlines()[0]}"
            ) from error


def close_simulators() -> None:
    """End the simulators between two episodes, before the process ends them."""
    while _idle:
        _end(_idle.pop())


def _end(env: Simulator) -> None:
    process = env._gateway.java_process
    with suppress(Exception):  # the JVM may have ended, and then nothing is left to close
        env.close()
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was written and not read
            pipe.close()
    env._obj_tree_tempdir.cleanup()


def _taken() -> Simulator:
    """Return an idle simulator, or a new one."""
    with _LOCK:
        while _idle:
            env = _idle.pop()
            if env._gateway.java_process.poll() is None:
                return env
    try:
        from scienceworld import ScienceWorldEnv
    except ImportError as error:
        raise missing_extra("scienceworld", "scienceworld") from error
    if shutil.which("java") is None:
        raise JobError(
            "ScienceWorld runs on Java, and there is no `java` on the PATH; install a Java runtime "
            "of version 8 or newer, such as Debian's `default-jre-headless`"
        )
    return ScienceWorldEnv("")


def _load(
    env: Simulator, name: str, variation: int, simplifications: str, *, gold: bool = False
) -> None:
    try:
        env.load(name, variation, simplifications, generateGoldPath=gold)
    except ValueError as error:
        raise ConfigError(f"`{name}` cannot be played with `{simplifications}`: {error}") from error
    env.server.reset()
