"""Episodes of text games in tests: fixed commands, and a player that chooses at random."""

import asyncio
import random
from collections.abc import Sequence

from rlake.loop.environments.environment import Environment, Step
from rlake.loop.environments.text_game import TextGameEnvironment
from rlake.store import Task


def played(environment: Environment, task: Task, answers: Sequence[str]) -> tuple[str, list[Step]]:
    """Play an episode to its end, or to that of the answers; return what is shown first, too."""

    async def play() -> tuple[str, list[Step]]:
        steps: list[Step] = []
        try:
            shown = await environment.reset(task)
            for answer in answers:
                steps.append(await environment.step({"role": "assistant", "content": answer}))
                if steps[-1].is_done:
                    break
        finally:
            await environment.close()
        return str(shown), steps

    return asyncio.run(play())


def played_at_random(world: TextGameEnvironment, task: Task, *, max_turns: int, seed: int) -> float:
    """Return the reward of an episode whose commands are random ones of the possible."""
    chance = random.Random(f"{seed}/{task.task_id}")

    async def play() -> float:
        total = 0.0
        try:
            await world.reset(task)
            for _ in range(max_turns):
                said = {"role": "assistant", "content": chance.choice(world.commands)}
                step = await world.step(said)
                total += step.reward or 0.0
                if step.is_done:
                    break
        finally:
            await world.close()
        return total

    return asyncio.run(play())
