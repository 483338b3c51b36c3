"""Episodes of experts as rows, for environments that know one."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from ...operators.concurrency import run_apart
from ...store.errors import ConfigError
from ...store.ids import content_id
from ...store.records import Experience, Message, Task
from .environment import Environment
from .episode import EnvironmentSpec, as_messages, beginning, make


@runtime_checkable
class Expert(Protocol):
    """What an environment has besides its three methods if it knows how to act."""

    async def expert(self) -> Message | None:
        """Return the answer that an expert would give now; None: it knows no more."""
        ...


def episodes(
    tasks: Sequence[Task], *, environment: EnvironmentSpec, max_turns: int = 64, at_once: int = 2
) -> Mapping[str, Sequence[Experience]]:
    """Let the expert of an environment act in each task, for `data.generator`.

    An episode is a row of `experiences` with source `expert`: the conversation that `multi_turn`
    would have with a policy that answers so, with its reward. At most `at_once` are played at the
    same time. Raises ConfigError for an environment without an expert, and what the environment
    raises.
    """

    async def play() -> list[Experience]:
        free = asyncio.Semaphore(at_once)

        async def one(task: Task) -> Experience:
            async with free:
                world = await make(environment)
                try:
                    return await _episode(task, world, environment, max_turns)
                finally:
                    await world.close()

        return await asyncio.gather(*map(one, tasks))

    return {"experiences": run_apart(play())}


async def _episode(
    task: Task, world: Environment, spec: EnvironmentSpec, max_turns: int
) -> Experience:
    if not isinstance(world, Expert):
        raise ConfigError(
            f"the environment `{spec}` has no expert; expected one with a method `expert`, such "
            "as textworld or scienceworld"
        )
    conversation = beginning(task, await world.reset(task))
    rewards: list[float] = []
    turns = 0
    for _ in range(max_turns):
        answer = await world.expert()
        if answer is None:
            break
        turns += 1
        conversation.append(answer)
        step = await world.step(answer)
        rewards += [] if step.reward is None else [step.reward]
        if step.is_done:
            break
        conversation += as_messages(step.shown)
    last = max((i for i, m in enumerate(conversation) if m["role"] == "assistant"), default=-1)
    name = f"expert-{content_id(str(spec), max_turns, length=8)}/{task.task_id}"
    row = Experience(
        task_id=task.task_id,
        group_id=name,
        experience_id=f"{name}/0",
        messages=conversation[: last + 1],
        prompt_text=task.prompt_text,
        response_text=str(conversation[last].get("content") or "") if turns else None,
        source="expert",
        num_turns=turns,
    )
    return row.with_reward({"environment": sum(rewards)} if rewards else {})
